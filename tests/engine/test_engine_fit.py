"""Which engines fit which pools, and how they may be parallel: settled before a model is loaded."""

import tempfile
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.worker.gpu_worker import Worker

from rose.admission.board import MAGIC, BoardWord
from rose.engine.hooks import patches
from rose.engine.hooks.compatibility import check_parallelism
from rose.engine.scheduling.scheduler import RoseScheduler
from rose.engine.settings import EngineSettings
from rose.errors import BoardError, ConfigError
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from rose.memory.slabs.backend import BackendKind
from rose.types import Role


def test_a_pool_that_does_not_fit_the_engine_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="rose-test-") as folder:
        monkeypatch.setenv("ROSE_RUNTIME_DIR", folder)
        with start_daemon(
            "two", num_slabs=4, slab_bytes=1 << 20, headroom_slabs=1, num_shards=2, runtime_dir=Path(folder)
        ):
            assert patches._pool_for("two", 2, BackendKind.HOST).num_slabs == 4
            with pytest.raises(
                ConfigError, match=r"an engine of 1 ranks .* pool two has 2: .* --num-shards 1"
            ):
                patches._pool_for("two", 1, BackendKind.HOST)
            with pytest.raises(ConfigError, match=r"two has host slabs, .* the pool with --backend cuda"):
                patches._pool_for("two", 2, BackendKind.CUDA)
            with PoolClient.observe("two") as observer:
                observer.board_words.store(BoardWord.MAGIC, MAGIC + 1)
            with pytest.raises(BoardError, match="both engines and the pool daemon must run the same ROSE"):
                patches._pool_for("two", 2, BackendKind.HOST)


def test_ranks_in_a_pool_are_on_one_host_and_those_of_decode_context_are_tensor_parallel_ones(
    tmp_path: Path,
) -> None:
    model = str(tmp_path)  # else vLLM looks for one
    assert check_parallelism(EngineArgs(model, tensor_parallel_size=4), has_pool=True) == 4
    stages = EngineArgs(model, tensor_parallel_size=2, pipeline_parallel_size=3)
    assert check_parallelism(stages, has_pool=True) == 6
    contexts = EngineArgs(
        model, tensor_parallel_size=2, prefill_context_parallel_size=2, decode_context_parallel_size=2
    )
    assert check_parallelism(contexts, has_pool=True) == 4
    with pytest.raises(ConfigError, match="--nnodes 2: a slab pool is on one host"):
        check_parallelism(EngineArgs(model, tensor_parallel_size=2, nnodes=2), has_pool=True)


def test_a_dedicated_engine_may_have_ranks_of_other_kinds_on_one_host(tmp_path: Path) -> None:
    arguments = EngineArgs(str(tmp_path), tensor_parallel_size=2, pipeline_parallel_size=2)
    assert check_parallelism(arguments, has_pool=False) == 4
    with pytest.raises(
        ConfigError, match="--nnodes 2: the copy of new weights that all ranks read is on one"
    ):
        check_parallelism(EngineArgs(str(tmp_path), nnodes=2), has_pool=False)


@pytest.mark.parametrize(
    ("pool", "given", "expected"),
    [(None, None, None), (None, 8192, 8192), ("p", None, 512), ("p", 8192, 512), ("p", 256, 256)],
)
def test_only_a_rollout_engine_in_a_pool_has_a_lower_token_limit_per_step(
    monkeypatch: pytest.MonkeyPatch, pool: str | None, given: int | None, expected: int | None
) -> None:
    with tempfile.TemporaryDirectory(prefix="rose-test-") as folder:
        monkeypatch.setenv("ROSE_RUNTIME_DIR", folder)
        args = EngineArgs(folder, max_num_batched_tokens=given, additional_config={})
        with start_daemon("p", num_slabs=2, slab_bytes=1 << 20, headroom_slabs=1, runtime_dir=Path(folder)):
            patches._apply(EngineSettings(role=Role.ROLLOUT, pool=pool), args)
    assert args.max_num_batched_tokens == expected


def test_a_floor_larger_than_the_pool_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="rose-test-") as folder:
        monkeypatch.setenv("ROSE_RUNTIME_DIR", folder)
        with start_daemon("p", num_slabs=8, slab_bytes=1 << 20, headroom_slabs=1, runtime_dir=Path(folder)):
            serving = EngineSettings(role=Role.SERVING, pool="p", floor_slabs=8)
            with pytest.raises(
                ConfigError, match=r"floor_slabs 8: pool p has 8 slabs, .* at least 1: use 7 or fewer"
            ):
                patches._apply(serving, EngineArgs(folder, additional_config={}))
            fits = serving.model_copy(update={"floor_slabs": 7})
            patches._apply(fits, EngineArgs(folder, additional_config={}))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("role", Role)
def test_both_roles_have_a_scheduler_class_for_what_vllm_chooses(role: Role, is_async: bool) -> None:
    chosen = resolve_obj_by_qualname(patches._scheduler(role, is_async=is_async))
    assert issubclass(chosen, RoseScheduler)
    assert issubclass(chosen, AsyncScheduler) is is_async


def test_both_platforms_have_a_worker_class_that_loads_anywhere() -> None:
    for name in ("rose.engine.hooks.worker.RoseCPUWorker", "rose.engine.hooks.gpu_worker.RoseGPUWorker"):
        assert issubclass(resolve_obj_by_qualname(name), Worker)
    assert patches._platform() == ("rose.engine.hooks.worker.RoseCPUWorker", BackendKind.HOST)
