"""Engines in processes of their own over one pool, of host memory and of CUDA's (stand-in driver, GPU)."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pool_setup import NUM_SLABS, PATIENCE_S, POOL, StartEngine, attach, observe, start_pool, wait_until

from rose.errors import PoolError
from rose.memory.daemon.daemon import DaemonHandle, start_daemon
from rose.memory.ledger.ledger_words import LedgerWord
from rose.memory.pool.pool import describe_pool
from rose.memory.pool.wire import Kind
from rose.memory.slabs.backend import BackendKind
from rose.types import Role


@pytest.fixture
def with_driver(stand_in_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from now on find the stand-in where the CUDA driver would be."""
    shutil.copy(stand_in_library, tmp_path / "libcuda.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


StartPool = Callable[..., None]
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


@pytest.fixture(params=["host", "stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def start_any_pool(request: pytest.FixtureRequest, runtime_dir: Path) -> Iterator[StartPool]:
    """Starts a daemon on each backend in turn; a second call kills the first one's."""
    if request.param == "stand-in":
        request.getfixturevalue("with_driver")
    backend = BackendKind.HOST if request.param == "host" else BackendKind.CUDA
    sizes = {"slab_bytes": 2 << 20} if request.param == "gpu" else {}
    with ExitStack() as stack:
        running: list[DaemonHandle] = []

        def start(num_shards: int = 1) -> None:
            if request.param == "gpu" and num_shards > len(list(NVIDIA_GPUS.glob("*"))):
                pytest.skip(f"needs {num_shards} GPUs")
            while running:
                os.kill(running[-1].pid, signal.SIGKILL)
                running.pop().stop()  # returns once it is gone
            handle = start_pool(runtime_dir, num_shards=num_shards, backend=backend, **sizes)
            running.append(stack.enter_context(handle))

        yield start


@pytest.mark.slow
def test_slabs_move_between_engines_zeroed(start_any_pool: StartPool, start_engine: StartEngine) -> None:
    start_any_pool()
    serving = start_engine("serving", "s0", "scheduler")
    rollout = start_engine("rollout", "r0", "scheduler")
    slabs = rollout.ask("acquire", NUM_SLABS)
    assert slabs == list(range(NUM_SLABS))
    assert rollout.ask("map", slabs) == 0
    assert rollout.ask("fill", 0xFF)
    assert serving.ask("acquire", 1) == []
    assert rollout.ask("drain", [3, 4], 1)
    assert rollout.ask("unmap", [3, 4]) == [3, 4]
    assert serving.ask("acquire", NUM_SLABS) == [3, 4]
    assert serving.ask("map", [3, 4]) == 0
    assert rollout.ask("read", 5) == [0xFF]


@pytest.mark.slow
def test_two_busy_engines_never_share_a_slab(
    start_any_pool: StartPool, start_engine: StartEngine, runtime_dir: Path
) -> None:
    start_any_pool()
    engines = [start_engine("serving", "s0", "scheduler"), start_engine("rollout", "r0", "scheduler")]
    for engine in engines:
        assert engine.process.stdin is not None
        engine.process.stdin.write('["churn", 200]\n')
        engine.process.stdin.flush()
    assert all(engine.answer() > 200 for engine in engines)
    with observe(runtime_dir) as watcher:
        watcher.ledger.check_integrity()
        assert watcher.ledger.num_free == NUM_SLABS


@pytest.mark.slow
def test_killed_engine_gives_its_slabs_back_and_the_other_keeps_its_own(
    start_any_pool: StartPool, start_engine: StartEngine, runtime_dir: Path
) -> None:
    start_any_pool()
    serving = start_engine("serving", "s0", "scheduler")
    rollout = start_engine("rollout", "r0", "scheduler")
    mine, theirs = serving.ask("acquire", 4), rollout.ask("acquire", 10)
    serving.ask("map", mine)
    serving.ask("fill", 7)
    rollout.ask("map", theirs)
    rollout.ask("drain", theirs[:2], 1)
    with observe(runtime_dir) as watcher:
        ledger = watcher.ledger
        assert ledger.engines()[rollout.slot].pid == rollout.process.pid
        rollout.kill()
        wait_until(ledger, lambda: rollout.slot not in ledger.engines())
        assert ledger.num_free == NUM_SLABS - 4
        assert ledger.owned(serving.slot) == mine
        assert ledger.count(LedgerWord.EXIT_FREED_SLABS, 0) == 10
        ledger.check_integrity()
    assert serving.ask("read", mine[0]) == [7]
    heir = start_engine("rollout", "r1", "scheduler")
    assert heir.ask("acquire", NUM_SLABS) == sorted(set(range(NUM_SLABS)) - set(mine))


@pytest.mark.slow
def test_killed_in_mid_churn_leaves_a_whole_ledger(
    pool: DaemonHandle, start_engine: StartEngine, runtime_dir: Path
) -> None:
    with observe(runtime_dir) as watcher:
        for round_ in range(4):
            engine = start_engine("rollout", f"r{round_}", "scheduler")
            assert engine.process.stdin is not None
            engine.process.stdin.write('["churn", 1000000]\n')
            engine.process.stdin.flush()
            wait_until(watcher.ledger, lambda: watcher.ledger.num_free < NUM_SLABS)
            engine.kill()
            wait_until(watcher.ledger, lambda: not watcher.ledger.engines())
            watcher.ledger.check_integrity()
            assert watcher.ledger.num_free == NUM_SLABS


@pytest.mark.slow
def test_ranks_have_slabs_of_their_own_that_move_on_together(
    start_any_pool: StartPool, start_engine: StartEngine, runtime_dir: Path
) -> None:
    start_any_pool(num_shards=2)
    donors = [start_engine("rollout", "r0", "worker", rank, 2) for rank in (0, 1)]
    heirs = [start_engine("serving", "s0", "worker", rank, 2) for rank in (0, 1)]
    with (
        attach(runtime_dir, engine_id="r0", world_size=2) as rollout,
        attach(runtime_dir, Role.SERVING, "s0", world_size=2) as serving,
    ):
        ledger = rollout.ledger
        slabs = ledger.acquire(rollout.slot, NUM_SLABS)
        for number, donor in enumerate(donors):
            assert donor.ask("map", slabs) == 0
            donor.ask("fill", 7 + number)
        assert [donor.ask("read", 1) for donor in donors] == [[7], [8]]
        ledger.drain([1, 3], 2)
        assert donors[1].ask("unmap", [1, 3]) == []
        assert ledger.acquire(serving.slot, 2) == []
        assert donors[0].ask("unmap", [1, 3]) == [1, 3]
        assert ledger.acquire(serving.slot, NUM_SLABS) == [1, 3]
        # What is mapped without being zeroed shows whose memory it was.
        assert [heir.ask("map", [1], False) for heir in heirs] == [7, 8]
        assert [heir.ask("map", [3]) for heir in heirs] == [0, 0]


@pytest.mark.slow
def test_a_restarted_daemon_takes_all_shards_over_and_buries_engines_as_before(
    start_any_pool: StartPool, start_engine: StartEngine, runtime_dir: Path
) -> None:
    start_any_pool(num_shards=2)
    ranks = [start_engine("rollout", "r0", "worker", rank, 2) for rank in (0, 1)]
    with attach(runtime_dir, engine_id="r0", world_size=2) as scheduler:
        ledger = scheduler.ledger
        slabs = ledger.acquire(scheduler.slot, 2)
        for rank in ranks:
            rank.ask("map", slabs)
            rank.ask("fill", 9)
        start_any_pool(num_shards=2)
        wait_until(ledger, lambda: not any(engine.is_leaving for engine in ledger.engines().values()))
        heir = start_engine("serving", "s0", "worker", 1, 2)
        ranks[0].kill()
        wait_until(ledger, lambda: ledger.num_quarantined == 2)
        with pytest.raises(PoolError, match=r"rollout engine 'r0' .* is leaving"):
            attach(runtime_dir, engine_id="r0", world_size=2, timeout_s=0.2)
    with observe(runtime_dir) as watcher:
        assert watcher.ledger.owned(scheduler.slot) == slabs
        ranks[1].kill()
        wait_until(watcher.ledger, lambda: watcher.ledger.num_free == NUM_SLABS)
    assert heir.ask("acquire", 2) == slabs
    assert heir.ask("map", slabs, False) == 18


def test_an_engine_with_other_ranks_than_the_pool_has_shards_is_refused_with_the_fix(
    start_any_pool: StartPool, runtime_dir: Path
) -> None:
    start_any_pool(num_shards=2)
    for kind in (Kind.SCHEDULER, Kind.WORKER):
        with pytest.raises(PoolError) as refusal:
            attach(runtime_dir, kind=kind, world_size=4)
        assert str(refusal.value) == (
            "an engine of 4 ranks (the product of its tensor-, pipeline- and "
            "prefill-context-parallel sizes) needs a pool of 4 shards, pool p has 2: start the engine with 2 "
            "ranks, or the pool with --num-shards 4"
        )


def test_an_observer_holds_the_pages_alone(start_any_pool: StartPool, runtime_dir: Path) -> None:
    start_any_pool(num_shards=2)
    with observe(runtime_dir) as watcher:
        assert watcher.num_shards == 2
        assert len(watcher._memory.fds) == 2
        with pytest.raises(ValueError, match="no slabs of shard 0 of 2 among 2 files"):
            watcher.open_slabs()


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"num_shards": 0}, "--num-shards 0: must be 1..16"),
        ({"num_shards": 3}, "device 2 of 2"),
        (
            {"num_slabs": 100, "slab_bytes": 16 << 20},
            "needs 1.7 GB on GPU 0, where 1.1 GB are free: use --num-slabs 64 or",
        ),
        ({"slab_bytes": 96 * 1024}, "multiple of the granularity of 65536 bytes, got 98304: use 131072"),
    ],
)
def test_cuda_pools_that_can_not_be_are_refused(
    with_driver: None, runtime_dir: Path, sizes: dict[str, int], reason: str
) -> None:
    with pytest.raises(PoolError, match=reason):
        start_pool(runtime_dir, backend=BackendKind.CUDA, **sizes)
    assert list(runtime_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [("0.32.0", "cuda", "cuda"), ("0.32.0", "cpu", "host"), ("0.32.0+cpu", "cuda", "host")],
)
def test_a_pool_lies_where_the_installed_vllm_computes(
    with_driver: None,
    runtime_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    target: str,
    expected: str,
) -> None:
    """The package has a name and a version alone, and is found before any other."""
    package = tmp_path / f"vllm-{version}.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("VLLM_TARGET_DEVICE", target)
    argv = [sys.executable, "-m", "rose.memory.daemon.daemon", POOL, "--runtime-dir", str(runtime_dir)]
    with subprocess.Popen([*argv, "--num-slabs", "4", "--slab-bytes", str(2 << 20)]) as daemon:
        assert describe_pool(POOL, runtime_dir=runtime_dir, timeout_s=PATIENCE_S).backend == expected
        daemon.terminate()


def test_a_cuda_pool_without_a_driver_is_refused(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcuda.so.1").write_text("no driver")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(PoolError, match=r"pool p: .*libcuda\.so\.1"):
        start_daemon(POOL, num_slabs=4, headroom_slabs=1, backend=BackendKind.CUDA, runtime_dir=runtime_dir)
    assert list(runtime_dir.iterdir()) == []


def test_a_pool_of_more_slabs_than_open_files_are_allowed_at_first(
    with_driver: None, runtime_dir: Path, start_engine: StartEngine
) -> None:
    """One descriptor per slab and shard, in daemon and client: both raise their limits ahead."""
    with start_daemon(
        POOL, num_slabs=700, slab_bytes=64 << 10, headroom_slabs=1, num_shards=2,
        backend=BackendKind.CUDA, runtime_dir=runtime_dir,
    ):  # fmt: skip
        engine = start_engine(Role.SERVING, "s0", "worker", 1, 2)
        assert engine.ask("acquire", 700) == list(range(700))
        assert engine.ask("map", [0, 699]) == 0
