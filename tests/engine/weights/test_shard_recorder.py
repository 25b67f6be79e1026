"""Shard plans say what vLLM's loaders do, for every rank and every parallel size, in one process."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import inspecting  # noqa: F401
from lib.transfer.pretended_rank import pretended_rank
from lib.transfer.shard_check import wrong_parameters
from rank_models import Checkpoint, dense, experts
from tiny_models import make_mamba_model
from vllm.engine.arg_utils import EngineArgs

from rose.engine.weights.shard_recorder import record_loading
from rose.transfer.format.checkpoint import read_checkpoint
from rose.transfer.format.shard_plan import Box, ShardPlan

GRIDS = [(1, 1), (2, 1), (4, 1), (8, 1), (4, 2)]
"""Tensor-parallel and pipeline-parallel sizes. Four and more ranks hold copies of the two KV heads."""


@pytest.fixture(scope="module", params=["untied", "tied", "experts"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    configs = {"untied": lambda: dense(False), "tied": lambda: dense(True), "experts": experts}
    return Checkpoint(tmp_path_factory.mktemp(request.param), configs[request.param]())


@pytest.mark.parametrize(("tp_size", "pp_size"), GRIDS)
@pytest.mark.slow
def test_a_plan_fills_every_parameter_as_the_loader_does(
    checkpoint: Checkpoint, tp_size: int, pp_size: int
) -> None:
    plans: list[ShardPlan] = []
    for pp_rank in range(pp_size):
        for tp_rank in range(tp_size):
            ranks = {"tp_rank": tp_rank, "tp_size": tp_size, "pp_rank": pp_rank, "pp_size": pp_size}
            with pretended_rank(checkpoint.vllm_config, **ranks) as config:
                plan = record_loading(config, checkpoint.specs).plan
                assert plan.rank == f"pp{pp_rank}-tp{tp_rank}" and plan.whole == []
                assert wrong_parameters(config, plan, checkpoint.tensors) == []
            plans.append(plan)
    check_shares(checkpoint, plans, tp_size * pp_size)


def check_shares(checkpoint: Checkpoint, plans: list[ShardPlan], num_ranks: int) -> None:
    """Checks that the ranks together hold everything, and each of them not much more than its share."""
    total = sum(spec.num_elements for spec in checkpoint.specs)
    for spec in checkpoint.specs:
        seen = torch.zeros(spec.shape, dtype=torch.bool)
        for plan in plans:
            for box in plan.boxes().get(spec.name, []):
                seen[tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))] = True
        assert seen.all(), spec.name
    # KV heads and norms are on several ranks, but they are small.
    most = max(plan.held_elements() for plan in plans)
    assert most == total if num_ranks == 1 else most < total * 0.75


def test_a_parameter_computed_from_what_was_copied_needs_the_loader(tmp_path: Path) -> None:
    """Mamba2 copies A_log and then puts -exp(A_log) in its place."""
    folder = make_mamba_model(tmp_path / "mamba")
    engine = EngineArgs(str(folder), dtype="float32", skip_tokenizer_init=True, enforce_eager=True)
    specs = [spec for spec, _ in read_checkpoint(folder).values()]
    with pretended_rank(engine.create_engine_config()) as config:
        plan = record_loading(config, specs).plan
    assert plan.whole == [f"model.layers.{layer}.mamba.A_log" for layer in range(3)]


def test_a_loader_that_puts_a_tensor_in_a_parameters_place_has_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does would be seen by nobody, and changes would not reach the parameter."""
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    def load_weights(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        norm = dict(weights)["model.norm.weight"]
        model.model.norm.weight = torch.nn.Parameter(norm, requires_grad=False)

    checkpoint = Checkpoint(tmp_path, dense(False))
    monkeypatch.setattr(Qwen3ForCausalLM, "load_weights", load_weights)
    with (
        pretended_rank(checkpoint.vllm_config) as config,
        pytest.raises(ValueError, match=r"another tensor in the place of model\.norm\.weight"),
    ):
        record_loading(config, checkpoint.specs)


def test_a_plan_knows_merged_replicated_and_padded_tensors(checkpoint: Checkpoint) -> None:
    with pretended_rank(checkpoint.vllm_config, tp_rank=7, tp_size=8) as config:
        boxes = record_loading(config, checkpoint.specs).plan.boxes()
    attention = "model.layers.0.self_attn"
    assert boxes[f"{attention}.q_proj.weight"] == [Box(start=(112, 0), stop=(128, 64))]
    assert boxes[f"{attention}.k_proj.weight"] == [Box(start=(16, 0), stop=(32, 64))]
    assert boxes[f"{attention}.o_proj.weight"] == [Box(start=(0, 112), stop=(64, 128))]
    # 330 rows are padded to 384, 48 for each rank: the last but one rank gets 42 of them, the last none.
    assert "model.embed_tokens.weight" not in boxes
