"""Each tensor is published in the dtype that engines' checkpoint has, whatever the trainer computes in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from rose.errors import FrameError
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.publish.torch_source import load_planes
from rose.transfer.relay.opening import open_relay

pytest.importorskip("transformers.core_model_loading", reason="transformers 5 is not installed")

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def with_routing_bias(dtype: torch.dtype) -> Any:
    """A GLM-4 whose router has a bias, which transformers and vLLM keep in float32."""
    from transformers import AutoModelForCausalLM, Glm4MoeConfig

    config = Glm4MoeConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=24,
        vocab_size=50,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        first_k_dense_replace=1,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    bias = model.get_buffer(BIAS)
    bias.copy_(torch.rand(4, generator=torch.Generator().manual_seed(3)))
    drawn = bias.clone()
    model = model.to(dtype)
    model.get_submodule(BIAS.rpartition(".")[0]).e_score_correction_bias = drawn
    return model


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    with_routing_bias(request.param).save_pretrained(folder)
    return folder


def in_files(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    found: dict[str, torch.Tensor] = safetensors.torch.load_file(file)
    return found


@pytest.fixture
def published(embedded_url: str) -> Iterator[Any]:
    """Returns what a follower has of the weights that are published."""
    made: list[WeightPublisher] = []
    relay = open_relay(embedded_url)

    def publish(weights: Any, **settings: Any) -> dict[str, torch.Tensor]:
        run = f"run-{len(made)}"
        made.append(WeightPublisher(weights, embedded_url, run, **settings))
        made[-1].publish()
        follower = Follower(relay, run, WeightMirror())
        assert follower.advance() and follower.mirror.planes is not None
        specs = follower.mirror.planes.layout.tensors
        dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        held = {spec.name: torch.zeros(spec.shape, dtype=dtypes[spec.dtype]) for spec in specs}
        load_planes(follower.mirror.planes, held)
        return held

    yield publish
    for each in made:
        each.close()
    relay.close()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert {name: each.dtype for name, each in found.items()} == {n: e.dtype for n, e in expected.items()}
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_trainer_in_float32_publishes_each_tensor_as_its_checkpoint_has_it(
    checkpoint: Path, published: Any
) -> None:
    from transformers import AutoModelForCausalLM

    expected = in_files(checkpoint)
    assert expected[BIAS].dtype == torch.float32 and not torch.equal(
        expected[BIAS], expected[BIAS].bfloat16().float()
    )
    trainer: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert {each.dtype for each in trainer.state_dict().values()} == {torch.float32}
    assert_equal(published(trainer), expected)
    gathered = {name: each.float() for name, each in expected.items()}  # as frameworks hand tensors out
    assert_equal(published(gathered, checkpoint=checkpoint), expected)
    # Without the files, the trainer's class says which of its tensors stay float32.
    trainer.config._name_or_path = ""
    found = published(trainer)
    assert {name for name, each in found.items() if each.dtype == torch.float32} == {BIAS}
    assert torch.equal(found[BIAS], expected[BIAS])


def test_float32_stays_beside_narrower_floats_of_a_trainer_without_a_checkpoint(published: Any) -> None:
    narrow = {"weight": torch.randn(8, 4).half(), "decay": torch.randn(8)}
    assert_equal(published(narrow), narrow)


def test_a_trainer_with_only_float32_publishes_bfloat16(tmp_path: Path, published: Any) -> None:
    """Engines compute in bfloat16 where a checkpoint has only float32, unless they are told otherwise."""
    weights = {"weight": torch.randn(8, 4), "decay": torch.randn(8)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    expected = {name: each.bfloat16() for name, each in weights.items()}
    assert_equal(published(weights), expected)
    assert_equal(published(weights, checkpoint=tmp_path), expected)
    assert_equal(published(weights, dtype="float32"), weights)


def test_what_a_checkpoint_has_in_float64_is_published_in_float32(tmp_path: Path, published: Any) -> None:
    weights = {"weight": torch.randn(8, 4), "decay": torch.randn(8)}
    narrow = {"weight": weights["weight"].bfloat16()}
    safetensors.torch.save_file(
        {**narrow, "decay": weights["decay"].double()}, tmp_path / "model.safetensors"
    )
    assert_equal(published(weights, checkpoint=tmp_path), {**narrow, "decay": weights["decay"]})


def test_integers_of_eight_bytes_are_left_out(published: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Such as a vision tower's position ids, which training does not change."""
    caplog.set_level("INFO")
    weights = {"weight": torch.randn(8, 4).bfloat16(), "position_ids": torch.arange(4)}
    assert_equal(published(weights), {"weight": weights["weight"]})
    said = "tensors of int64 or uint64 that are not published: 1, first position_ids; engines keep their own"
    assert [each.message for each in caplog.records if "position_ids" in each.message] == [said]


def test_a_dtype_that_is_asked_for_is_that_of_all_floats(checkpoint: Path, published: Any) -> None:
    found = published(in_files(checkpoint), dtype="bfloat16")
    assert {each.dtype for each in found.values()} == {torch.bfloat16}


def test_a_checkpoint_that_is_not_on_this_machine_leaves_the_choice_to_the_trainers_floats(
    published: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    weights = {"weight": torch.randn(8, 4).bfloat16(), "decay": torch.randn(8)}
    assert_equal(published(weights, checkpoint="nobody/has-this-model"), weights)
    assert sum("nobody/has-this-model" in each.message for each in caplog.records) == 1


def test_a_checkpoint_folder_that_is_not_there_is_refused(published: Any, tmp_path: Path) -> None:
    weights = {"weight": torch.randn(8, 4)}
    (tmp_path / "file").touch()
    wrongs = [
        tmp_path / "none",
        Path("none"),
        str(tmp_path / "none"),
        "./none",
        "~/none",
        "a/b/none",
        "none/",
    ]
    for wrong in [*wrongs, tmp_path / "file"]:
        for dtype in ("auto", "bfloat16"):
            with pytest.raises(
                ValueError, match=f"checkpoint {wrong}: this machine has no such folder; give"
            ):
                published(weights, checkpoint=wrong, dtype=dtype)


def test_tensors_of_a_checkpoint_that_are_never_published_may_have_any_dtype(
    checkpoint: Path, published: Any
) -> None:
    from transformers import AutoModelForCausalLM

    expected = in_files(checkpoint)
    trainer: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    others = {"position_ids": torch.arange(4), "scale": torch.ones(2).double()}
    safetensors.torch.save_file(others, checkpoint / "others.safetensors")
    assert_equal(published(trainer), expected)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\nsize 12\n"])
def test_only_a_checkpoint_that_is_asked_for_has_to_be_readable(
    checkpoint: Path, published: Any, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    from transformers import AutoModelForCausalLM

    trainer: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    (checkpoint / "pointer.safetensors").write_bytes(content)
    found = published(trainer)
    assert {name for name, each in found.items() if each.dtype == torch.float32} == {BIAS}
    assert [each.levelname for each in caplog.records if "pointer.safetensors" in each.message] == ["WARNING"]
    with pytest.raises(FrameError, match=r"pointer\.safetensors: not a safetensors file"):
        published(trainer, checkpoint=checkpoint)
