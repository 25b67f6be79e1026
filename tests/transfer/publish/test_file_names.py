"""A transformers model's weights arrive under the names, and in the tensors, that its files have."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.publish.file_names import as_in_files
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.publish.torch_source import TensorShard, load_planes, shard_of
from rose.transfer.relay.opening import open_relay

pytest.importorskip("transformers.core_model_loading", reason="transformers 5 is not installed")

SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 24, "vocab_size": 50}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
RANKS = {"q_lora_rank": 16, "kv_lora_rank": 16}
LATENT = {**RANKS, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def qwen() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(num_experts=4, moe_intermediate_size=12, head_dim=8, **SHAPE, **HEADS)


def mixtral() -> Any:
    """Its files call the experts' modules otherwise than transformers does."""
    from transformers import MixtralConfig

    return MixtralConfig(num_local_experts=3, **SHAPE, **HEADS)


def deepseek() -> Any:
    from transformers import DeepseekV2Config

    mixture = {"n_routed_experts": 4, "moe_intermediate_size": 12, "first_k_dense_replace": 1}
    return DeepseekV2Config(num_attention_heads=4, **mixture, **LATENT, **SHAPE)


def dense() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(head_dim=8, **SHAPE, **HEADS)


@pytest.fixture(params=[qwen, mixtral, deepseek, dense])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    make: Callable[[], Any] = request.param
    yield AutoModelForCausalLM.from_config(make(), dtype=torch.bfloat16)


def in_files(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    found: dict[str, torch.Tensor] = safetensors.torch.load_file(file)
    return found


def test_each_version_is_what_the_model_would_save(model: Any, embedded_url: str, tmp_path: Path) -> None:
    relay = open_relay(embedded_url)
    publisher = WeightPublisher(model, embedded_url, "run")
    follower = Follower(relay, "run", WeightMirror())
    for version in range(2):
        publisher.publish()
        assert follower.advance()
        expected = in_files(model, tmp_path / str(version))
        assert follower.mirror.planes is not None
        held = {name: torch.zeros_like(each) for name, each in expected.items()}
        assert {each.name for each in follower.mirror.planes.layout.tensors} == held.keys()
        load_planes(follower.mirror.planes, held)
        assert all(torch.equal(held[name], each) for name, each in expected.items())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
    publisher.close()
    relay.close()


def test_a_model_that_moves_after_its_publisher_was_made_is_followed(
    model: Any, embedded_url: str, tmp_path: Path
) -> None:
    """As a trainer moves it to its device: each parameter gets other memory."""
    relay = open_relay(embedded_url)
    publisher = WeightPublisher(model, embedded_url, "run")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    publisher.publish()
    follower = Follower(relay, "run", WeightMirror())
    assert follower.advance() and follower.mirror.planes is not None
    expected = in_files(model, tmp_path)
    held = {name: torch.zeros_like(each) for name, each in expected.items()}
    load_planes(follower.mirror.planes, held)
    assert [name for name, each in expected.items() if not torch.equal(held[name], each)] == []
    publisher.close()
    relay.close()


@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_rank_with_a_part_of_stacked_experts_has_the_same_part_of_each(
    model: Any, dimension: int, is_distributed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its parts are DTensors, as FSDP2's are."""
    expected = in_files(model, tmp_path)
    made = {name: torch.zeros_like(each) for name, each in expected.items()}
    whole = {name: each.detach() for name, each in model.state_dict().items()}
    cut = distributed_part_of if is_distributed else part_of
    for rank in range(3):
        shards = {name: cut(tensor, dimension, rank) for name, tensor in whole.items()}
        monkeypatch.setattr(model, "state_dict", lambda keep_vars, own=shards: own)
        pairs = as_in_files(model)
        for name, value in pairs if pairs is not model else shards.items():
            shard = shard_of(value)
            assert shard.shape == tuple(expected[name].shape)
            ends = zip(shard.box.start, shard.box.stop, strict=True)
            made[name][tuple(slice(*each) for each in ends)] = shard.part
    assert all(torch.equal(made[name], each) for name, each in expected.items())


def part_of(tensor: torch.Tensor, dimension: int, rank: int) -> TensorShard:
    """A third of a tensor along a dimension."""
    along = min(dimension, tensor.ndim - 1)
    parts = torch.tensor_split(tensor, 3, dim=along)
    begin = sum(each.shape[along] for each in parts[:rank])
    start = tuple(begin if axis == along else 0 for axis in range(tensor.ndim))
    return TensorShard(tensor=parts[rank], shape=tuple(tensor.shape), start=start)


def distributed_part_of(tensor: torch.Tensor, dimension: int, rank: int) -> torch.Tensor:
    """The same as torch's own ranks have it, here without the others."""
    along = Shard(min(dimension, tensor.ndim - 1))
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        mesh = init_device_mesh("cpu", (3,))
        return distribute_tensor(tensor, mesh, [along], src_data_rank=None)
    finally:
        distributed.destroy_process_group()
