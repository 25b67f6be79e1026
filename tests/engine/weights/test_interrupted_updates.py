"""Updates that break off, or that are not taken, leave an engine with the weights of one version."""

import fcntl
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from lib.transfer.pretended_rank import pretended_rank
from mirrored import Mirrored, prepare
from rank_models import Checkpoint, after_a_step, dense, differing, loaded_model

from rose.engine.weights.weights import StagedUpdate, StagedWeightEngine
from rose.errors import FrameError


class Following:
    """One rank of an engine that runs version 0 of a model, with version 1 prepared."""

    def __init__(self, config: Any, checkpoint: Checkpoint, mirrored: Mirrored) -> None:
        self.config = config
        first = mirrored.put(checkpoint.tensors)
        self.model = loaded_model(config, checkpoint.tensors, is_processed=True)
        self.engine = StagedWeightEngine(None, config, torch.device("cpu"), self.model)
        self.engine.receive_weights(StagedUpdate(first.path, first.state_hash))
        self.later = after_a_step(checkpoint.tensors, 0.05, seed=1, is_finite=True)
        update = mirrored.put(self.later)
        self.path, self.state_hash = update.path, update.state_hash
        assert prepare(self.engine, update.changes, update.state_hash) is None

    def receive(self) -> None:
        self.engine.receive_weights(StagedUpdate(self.path, self.state_hash, is_prepared=True))

    def wrong(self) -> list[str]:
        return differing(self.model, loaded_model(self.config, self.later, is_processed=True))


@pytest.fixture
def following(mirrored: Mirrored, tmp_path: Path) -> Iterator[Following]:
    checkpoint = Checkpoint(tmp_path / "model", dense(is_tied=True), dtype="float32", is_finite=True)
    with pretended_rank(checkpoint.vllm_config) as config:
        made = Following(config, checkpoint, mirrored)
        yield made
        made.engine.shutdown()


def test_a_mirror_stays_at_its_version_until_what_broke_off_in_place_is_loaded_from_it(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of an update lies in the model then, and the mirror alone has all of a version."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    process = UnquantizedEmbeddingMethod.process_weights_after_loading
    is_kept: list[bool] = []

    def failing_once(*args: Any) -> None:
        with open(following.path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_kept.append(True)
        if len(is_kept) == 1:
            raise RuntimeError("no memory")
        process(*args)

    monkeypatch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", failing_once)
    following.receive()
    assert len(is_kept) > 1
    assert (following.engine.why_whole, following.engine.is_mixed) == ("no memory", False)
    monkeypatch.undo()
    assert following.wrong() == []


def test_no_step_computes_with_weights_that_could_not_be_loaded_to_the_end(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rose.engine.hooks.rank import RoseWorker

    def failing(*_: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr("vllm.model_executor.model_loader.reload.finalize_layerwise_reload", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            following.receive()
    worker: Any = SimpleNamespace(weight_transfer_engine=following.engine)
    step: Any = SimpleNamespace(total_num_scheduled_tokens=1)
    with pytest.raises(FrameError, match="left them of no version"):
        RoseWorker.execute_model(worker, step)
    following.engine.load()
    assert not following.engine.is_mixed
    assert following.wrong() == []


def test_a_rank_that_took_an_update_which_failed_on_another_one_takes_the_next(following: Following) -> None:
    from rose.engine.hooks.rank import RoseWorker
    from rose.engine.vllm_version import VERSIONS_KEY, versions

    following.config.additional_config = {"rose": {"role": "rollout"}, VERSIONS_KEY: versions()}
    worker: Any = RoseWorker(following.config, local_rank=0, rank=0, distributed_init_method="")
    worker.weight_transfer_engine = following.engine
    worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
    worker.start_weight_update()
    following.receive()
    with pytest.raises(RuntimeError, match="already active"):
        worker.start_weight_update()
    for _ in range(2):  # vLLM has ended the session on a rank that failed
        worker.end_weight_update()
    worker.start_weight_update()
    assert following.wrong() == []


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.slow
def test_changes_that_an_update_does_not_take_leave_the_memory(
    mirrored: Mirrored, tmp_path: Path, is_tied: bool
) -> None:
    """A changes file whose name is gone takes memory as long as it is mapped."""

    def num_mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("changes-test-1")

    checkpoint = Checkpoint(tmp_path / "model", dense(is_tied))
    with pretended_rank(checkpoint.vllm_config) as config:
        following = Following(config, checkpoint, mirrored)
        assert num_mapped() > 0
        following.engine.receive_weights(StagedUpdate(following.path, following.state_hash))
        assert num_mapped() == 0
        following.engine.shutdown()
