"""A trainer's weights arrive as a checkpoint in fp8 has them, and only changed numbers and scales cross."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fp8_ranks
import pytest
import safetensors.torch
import torch
from fp8_checkpoint import (
    BLOCK,
    CHANNEL,
    QUANTIZED,
    SCHEMES,
    TENSOR,
    model_tensors,
    scales_name,
    write_checkpoint,
)
from training_steps import Weights

from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.publish import quantized_source
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.publish.quantized_source import QuantizedSource
from rose.transfer.publish.torch_source import TensorShard, load_planes
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay
from rose.transfer.rollback import roll_back

Publish = Callable[..., WeightPublisher]
ROW_BLOCK = 128
PATIENCE_S = 600.0


def as_vllm_quantizes(kind: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the numbers and scales that vLLM makes of a weight when it quantizes it itself."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    if kind == "block":
        numbers, scales = per_block_cast_to_fp8(weight)  # not compiled (conftest.py)
        return numbers, scales
    if kind == "channel":
        scales = fp8._fp8_channel_scale(fp8.weight_amax(weight, dim=-1, keepdim=True))
        return fp8._fp8_quant_per_channel(weight, scales), scales
    scales = fp8._fp8_scale(fp8.weight_amax(weight).reshape(1))
    # vLLM's kernel for this, static_scaled_fp8_quant, runs on a GPU alone.
    return (weight.float() * scales.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def whole(kind: str, weights: Weights) -> Weights:
    """The tensors of a checkpoint that is made of these weights at once."""
    made = {}
    for name, weight in weights.items():
        made[name] = weight.bfloat16()
        if name in QUANTIZED:
            made[name], made[scales_name(name, SCHEMES[kind])] = as_vllm_quantizes(kind, weight.bfloat16())
    return made


def bits(tensors: Weights) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (each.dtype, each.shape, each.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, each in tensors.items()
    }


def held_by(mirror: WeightMirror, like: Weights) -> Weights:
    """What a mirror holds, which must be tensors of these names, dtypes and shapes."""
    held = {name: torch.zeros_like(each) for name, each in like.items()}
    assert mirror.planes is not None
    assert {each.name for each in mirror.planes.layout.tensors} == held.keys()
    load_planes(mirror.planes, held)
    return held


@pytest.fixture
def relay(embedded_url: str) -> Iterator[Relay]:
    relay = open_relay(embedded_url)
    yield relay
    relay.close()


@pytest.fixture
def publish(embedded_url: str) -> Iterator[Publish]:
    made: list[WeightPublisher] = []

    def make(weights: Any, run_id: str, **arguments: Any) -> WeightPublisher:
        made.append(WeightPublisher(weights, embedded_url, run_id, **arguments))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", SCHEMES)
def test_each_version_has_the_bits_of_a_checkpoint_that_is_quantized_whole(
    publish: Publish,
    relay: Relay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(quantized_source, "_CHUNK_ELEMENTS", 1 << 12)  # several chunks for each matrix
    weights = {name: each.to(dtype) for name, each in model_tensors().items()}
    weights[QUANTIZED[0]][3] = 0.0
    weights[QUANTIZED[0]][4] = 1e-6
    weights[QUANTIZED[1]][5, 6] = 1000.0
    like = write_checkpoint(tmp_path, SCHEMES[kind], weights)
    publisher = publish(weights, "run", quantized_like=like, bucket_bytes=1 << 14)
    follower = Follower(relay, "run", WeightMirror())
    for number in range(4):
        report = publisher.publish()
        assert follower.advance() and follower.mirror.version == report.version
        assert report.base == (number - 1 if number else None)
        expected = whole(kind, weights)
        assert bits(held_by(follower.mirror, expected)) == bits(expected)
        for weight in weights.values():
            weight += 1e-3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    follower.mirror.check_integrity()


def test_weights_of_zeros_are_zeros_in_fp8(tmp_path: Path) -> None:
    for kind, config in SCHEMES.items():
        weights = {name: torch.zeros_like(each) for name, each in model_tensors().items()}
        like = write_checkpoint(tmp_path / kind, config, weights)
        source = QuantizedSource(weights, "bfloat16", like)
        source.prepare()
        made = {name: shard.tensor for name, shard in source.named_shards()}
        scales = [made[scales_name(name, config)] for name in QUANTIZED]
        assert all(bool((each > 0).all()) for each in scales)
        assert not any(bool(made[name].float().any()) for name in QUANTIZED)


@pytest.mark.parametrize("kind", SCHEMES)
def test_what_a_step_leaves_alone_in_fp8_does_not_cross_the_link(
    publish: Publish, tmp_path: Path, kind: str
) -> None:
    """Steps as small as a real optimizer's change many bits in bfloat16, and few after quantization."""
    weights = model_tensors()
    like = write_checkpoint(tmp_path, SCHEMES[kind], weights)
    plain, quantized = publish(weights, "plain"), publish(weights, "quantized", quantized_like=like)
    for publisher in (plain, quantized):
        publisher.publish()
    for name in QUANTIZED:
        weights[name] += 1e-5 * torch.sign(torch.randn(weights[name].shape))
    sent = [publisher.publish().wire_bytes for publisher in (plain, quantized)]
    assert sent[1] < sent[0] / 3


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_shards_that_are_cut_between_groups_make_the_same_bits(tmp_path: Path, kind: str) -> None:
    weights = model_tensors()
    like = write_checkpoint(tmp_path, SCHEMES[kind], weights)
    expected = bits(whole(kind, weights))
    found: dict[str, list[TensorShard]] = {}
    for begin, end in ((0, ROW_BLOCK), (ROW_BLOCK, None)):
        shards = [
            (name, TensorShard(tensor=each[begin:end], shape=tuple(each.shape), start=(begin, 0)))
            for name, each in weights.items()
            if name in QUANTIZED
        ]
        source = QuantizedSource(shards, "bfloat16", like)
        source.prepare()
        for name, shard in source.named_shards():
            found.setdefault(name, []).append(shard)
    joined = {name: torch.cat([each.tensor for each in shards]) for name, shards in found.items()}
    assert bits(joined) == {name: expected[name] for name in joined}
    assert all(shards[0].box.stop[0] == shards[1].start[0] for shards in found.values())
    cut = TensorShard(tensor=weights[QUANTIZED[0]][:, :100], shape=(450, 200), start=(0, 0))
    with pytest.raises(ValueError, match=r"holds \[0, 0\] to \[450, 100\] of \[450, 200\], and \d+ rows by"):
        QuantizedSource({QUANTIZED[0]: cut}, "bfloat16", like)


def test_one_scale_for_a_tensor_needs_the_whole_tensor(tmp_path: Path) -> None:
    weights = model_tensors()
    like = write_checkpoint(tmp_path, TENSOR, weights)
    half = TensorShard(tensor=weights[QUANTIZED[0]][:225], shape=(450, 200), start=(0, 0))
    with pytest.raises(ValueError, match="450 rows by 200 columns have a scale in common"):
        QuantizedSource({QUANTIZED[0]: half}, "bfloat16", like)


@pytest.mark.slow
def test_ranks_that_hold_parts_of_a_tensor_with_one_scale_make_the_same_bits(
    embedded_url: str, relay: Relay, tmp_path: Path
) -> None:
    """One of three ranks has the tensor's largest number; one tensor is on rank 0 alone."""
    like = write_checkpoint(tmp_path / "fp8", TENSOR, model_tensors())
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    arguments = ["3", str(tmp_path / "rendezvous"), embedded_url, str(like)]
    ranks = subprocess.Popen(
        [sys.executable, fp8_ranks.__file__, *arguments], env=environment, start_new_session=True
    )
    try:
        assert ranks.wait(PATIENCE_S) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    follower = Follower(relay, "run", WeightMirror())
    assert follower.advance() and str(follower.mirror.version) == "run/1"
    expected = whole("tensor", fp8_ranks.weights_at(1))
    assert bits(held_by(follower.mirror, expected)) == bits(expected)


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        ("gloo", "cpu", "cpu"),
        ("gloo", None, "cpu"),
        ("cuda:gloo", "cpu", "cuda"),  # NCCL's group, too, has a backend for CUDA alone
        ("cuda:gloo", "cuda:1", "cuda:1"),
        ("cuda:gloo", None, "cuda"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:gloo", None, "cpu"),
    ],
)
def test_the_largest_numbers_are_reduced_where_torchs_group_has_a_backend(
    tmp_path: Path, backend: str, device: str | None, expected: str
) -> None:
    from torch import distributed

    distributed.init_process_group(backend, init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        own = torch.device(device) if device is not None else None
        assert torch.device(quantized_source.reducing_device(own)) == torch.device(expected)
    finally:
        distributed.destroy_process_group()


def changed(config: dict[str, Any], **weights: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with other values for weights."""
    (group,) = config["config_groups"].values()
    return {**config, "config_groups": {"linear": {**group, "weights": {**group["weights"], **weights}}}}


@pytest.mark.parametrize(
    "config, problem",
    [
        ({"quant_method": "awq"}, "quant_method is 'awq', expected 'fp8' or 'compressed-tensors'"),
        ({**TENSOR, "activation_scheme": "static"}, "activation_scheme is 'static', expected 'dynamic'"),
        ({**BLOCK, "scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0', expected None"),
        (
            {**BLOCK, "weight_block_size": [128]},
            r"weight_block_size is \[128\], expected two numbers above 0",
        ),
        (changed(CHANNEL, type="int"), "type is 'int', expected 'float'"),
        (changed(CHANNEL, num_bits=4), "num_bits is 4, expected 8"),
        (
            changed(CHANNEL, strategy="group"),
            "strategy is 'group', expected 'tensor' or 'channel' or 'block'",
        ),
        ({**CHANNEL, "config_groups": {}}, "config_groups quantize weights in 0 ways, expected 1"),
    ],
)
def test_a_checkpoint_that_is_quantized_otherwise_is_refused(
    tmp_path: Path, config: dict[str, Any], problem: str
) -> None:
    weights = model_tensors()
    like = write_checkpoint(tmp_path, config, weights)
    with pytest.raises(ValueError, match=problem):
        QuantizedSource(weights, "bfloat16", like)


def test_tensors_that_a_checkpoint_does_not_have_as_the_trainer_does_are_refused(tmp_path: Path) -> None:
    weights = model_tensors()
    like = write_checkpoint(tmp_path, CHANNEL, weights)
    with pytest.raises(ValueError, match=r"tensor head.weight has shape \[2\], and .* has none of this name"):
        QuantizedSource({"head.weight": torch.zeros(2)}, "bfloat16", like)
    with pytest.raises(ValueError, match=r"tensor norm.weight has shape \[2\], and .* has it as .*200"):
        QuantizedSource({"norm.weight": torch.zeros(2)}, "bfloat16", like)
    file = like / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    scales = tensors.pop(f"{QUANTIZED[0]}_scale")
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(ValueError, match=r"up_proj.weight is F8_E4M3, and .*up_proj.weight_scale is missing"):
        QuantizedSource(weights, "bfloat16", like)
    tensors[f"{QUANTIZED[0]}_scale"] = scales[:449].clone()
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(ValueError, match=r"weight_scale has shape \[449, 1\], expected \[450, 1\]"):
        QuantizedSource(weights, "bfloat16", like)
    safetensors.torch.save_file(weights, file)
    with pytest.raises(ValueError, match="none of 4 tensors is F8_E4M3"):
        QuantizedSource(weights, "bfloat16", like)
    (like / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.json has no quantization_config"):
        QuantizedSource(weights, "bfloat16", like)


def test_a_tensor_that_changes_its_shape_and_a_way_back_to_a_quantized_version_are_refused(
    publish: Publish, tmp_path: Path
) -> None:
    weights = model_tensors()
    like = write_checkpoint(tmp_path, BLOCK, weights)
    publisher = publish(weights, "run", quantized_like=like)
    publisher.publish()
    with pytest.raises(ValueError, match="the published weights are quantized: load the trainer's own"):
        roll_back(publisher, 0)
    weights[QUANTIZED[0]].data = torch.zeros(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="begin a new run"):
        publisher.publish()
