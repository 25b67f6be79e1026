"""When one process of an engine of two ranks is killed, none is left, and the engine's slabs are free."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from async_runs import answer_over_cuts_on_ranks
from forked_engines import forks
from probes import prompt
from real_engine import RealEngine, runtime_dir, until
from references import ModelDirs
from tiny_models import SLAB_BYTES

from rose.memory.daemon.daemon import start_daemon
from rose.memory.daemon.pool_state import read_state
from rose.memory.pool.pool import PoolClient
from rose.memory.pool.processes import is_readable
from rose.memory.pool.wire import Kind
from rose.types import GateMode, Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_RANKS, NUM_SLABS = 2, 24
POOL = "orphans"
ENDLESS = 1 << 30
END_S = 120.0
SPIN_S = 5.0
"""Of CPU time. A rank without work takes 1 s until it sleeps."""


@pytest.fixture
def pool(engines_dir: Path) -> Iterator[PoolClient]:
    """A pool of two shards."""
    folder = runtime_dir(engines_dir)
    daemon = start_daemon(
        POOL,
        num_slabs=NUM_SLABS,
        num_shards=NUM_RANKS,
        slab_bytes=SLAB_BYTES // NUM_RANKS,
        headroom_slabs=1,
        runtime_dir=folder,
    )
    with (
        daemon,
        PoolClient.observe(POOL, runtime_dir=folder) as observer,
    ):
        yield observer


def test_a_rank_that_waits_for_a_dead_one_ends_with_its_engine_core(
    engines_dir: Path, models: ModelDirs, pool: PoolClient
) -> None:
    """It waits in an all-reduce, where vLLM tells it nothing."""
    prompts = [prompt(f"orphan-{index}", 100) for index in range(4)]
    with forks(engines_dir) as start:
        core = start(
            answer_over_cuts_on_ranks,
            **{"model": models.untied[0], "pool": POOL, "prompts": prompts, "max_tokens": 40},
            **{"num_rounds": ENDLESS, "tensor_parallel_size": NUM_RANKS},
        )
        until(lambda: core.has_ended or pool.ledger.num_held(Role.ROLLOUT) > 2, "rollouts hold slabs")
        waiting, stopped = ranks(engines_dir)
        try:
            stopped.suspend()
            began_s, pidfd = cpu_s(waiting), os.pidfd_open(waiting.pid)
            until(lambda: core.has_ended or cpu_s(waiting) > began_s + SPIN_S, "rank 0 waits for rank 1")
            core.stop()
            stopped.kill()
            assert is_readable(pidfd, END_S), "rank 0 lives on"
            os.close(pidfd)
        finally:
            for rank in (waiting, stopped):
                with suppress(psutil.NoSuchProcess):
                    rank.kill()
    until_free(pool)


def test_an_engine_core_and_its_ranks_end_with_an_api_server_that_nobody_watches(
    engines_dir: Path, models: ModelDirs, pool: PoolClient
) -> None:
    """As one that `vllm serve` started, without the watcher that `rose serve` has."""
    flags = ("--dtype", "float32", "--tensor-parallel-size", str(NUM_RANKS))
    engine = RealEngine(models.untied[0], Role.ROLLOUT, engines_dir, *flags, pool=POOL, gate=GateMode.OFF)
    try:
        engine.wait_ready()
        requests = engine.start_requests([prompt(f"lost-{index}", 100) for index in range(8)], max_tokens=700)
        until(lambda: pool.ledger.num_held(Role.ROLLOUT) > 2, "rollouts hold slabs")
        pidfds = [os.pidfd_open(rank.pid) for rank in ranks(engines_dir)]
        assert engine.process._watcher is not None
        engine.process._watcher.kill()
        engine.process._watcher.wait()
        os.kill(engine.process.pid, signal.SIGKILL)
        assert all(is_readable(pidfd, END_S) for pidfd in pidfds), "its ranks live on"
        until_free(pool)
        assert any(request.exception() is not None for request in requests)
    finally:
        engine.stop()


def ranks(folder: Path) -> list[psutil.Process]:
    """The processes of rank 0 and of rank 1."""
    state = read_state(runtime_dir(folder) / f"pool-{POOL}.state")
    assert state is not None
    workers = [one.hello for one in state.members if one.hello.kind is Kind.WORKER]
    assert len(workers) == NUM_RANKS
    return [psutil.Process(worker.pid) for worker in sorted(workers, key=lambda each: each.rank)]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def until_free(pool: PoolClient) -> None:
    until(lambda: pool.ledger.num_free == NUM_SLABS, "all slabs are free")
    pool.ledger.check_integrity()
