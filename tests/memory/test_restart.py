"""A pool outlives its daemon: the next one takes its memory back from the engines that hold it."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from pool_setup import (
    HEADROOM_SLABS,
    NUM_SLABS,
    PATIENCE_S,
    POOL,
    SLAB_BYTES,
    StartEngine,
    attach,
    observe,
    start_pool,
    wait_until,
)
from restart_setup import (
    Daemons,
    attach_again,
    attach_raw,
    come_back,
    refuse_back,
    tensor_parallel,
    wait_all_back,
    wait_taking_over,
)

from rose.errors import PoolError
from rose.memory.daemon import owner
from rose.memory.daemon.owner import PoolOwner
from rose.memory.ledger.ledger_words import LedgerWord
from rose.memory.pool.pool import describe_pool
from rose.memory.pool.pool_memory import PoolMemory, PoolSize
from rose.memory.pool.wire import Kind
from rose.types import Role


@pytest.fixture
def daemons(runtime_dir: Path) -> Iterator[Daemons]:
    """Daemons of a pool for engines of one rank."""
    with ExitStack() as stack:
        yield Daemons(runtime_dir, stack)


@pytest.fixture
def sharded(runtime_dir: Path) -> Iterator[Daemons]:
    """Daemons of a pool for engines of two ranks."""
    with ExitStack() as stack:
        yield Daemons(runtime_dir, stack, num_shards=2)


@pytest.mark.slow
def test_a_restarted_daemon_takes_the_memory_over_and_engines_never_notice(
    sharded: Daemons, start_engine: StartEngine, runtime_dir: Path
) -> None:
    serving = tensor_parallel(start_engine, "serving", "s0")
    rollout = start_engine("rollout", "r0", "scheduler", 0, 2)
    mine, theirs = serving[0].ask("acquire", 3), rollout.ask("acquire", NUM_SLABS)
    for rank in serving[1:]:
        rank.ask("map", mine)
    serving[1].ask("fill", 7)
    rollout.ask("map", theirs)
    for _ in range(2):
        sharded.kill()
        # Slabs move without a daemon.
        rollout.ask("drain", theirs[:2], 1)
        assert rollout.ask("unmap", theirs[:2]) == theirs[:2]
        assert serving[0].ask("acquire", 1) == theirs[:1]
        serving[0].ask("drain", theirs[:1], 0)
        assert rollout.ask("acquire", 2) == theirs[:2]
        rollout.ask("map", theirs[:2])
        sharded.start()
        with observe(runtime_dir) as watcher:
            wait_all_back(watcher.ledger)
            engines = watcher.ledger.engines()
            assert engines[serving[0].slot].pid == serving[0].process.pid
            assert (engines[serving[0].slot].world_size, engines[rollout.slot].role) == (2, Role.ROLLOUT)
            assert watcher.ledger.owned(serving[0].slot) == mine
            assert watcher.ledger.owned(rollout.slot) == theirs
            watcher.ledger.check_integrity()
        assert [rank.ask("read", mine[0]) for rank in serving[1:]] == [[7], [0]]
    assert not [path for path in runtime_dir.iterdir() if path.suffix == ".new"]


@pytest.mark.slow
def test_an_engine_killed_after_the_restart_gives_its_slabs_back_and_a_new_one_joins(
    daemons: Daemons, start_engine: StartEngine, runtime_dir: Path
) -> None:
    serving = start_engine("serving", "s0", "scheduler")
    rollout = start_engine("rollout", "r0", "scheduler")
    mine, _ = serving.ask("acquire", 3), rollout.ask("acquire", NUM_SLABS)
    daemons.restart()
    with observe(runtime_dir) as watcher:
        wait_all_back(watcher.ledger)
        rollout.kill()
        wait_until(watcher.ledger, lambda: rollout.slot not in watcher.ledger.engines())
        assert watcher.ledger.num_free == NUM_SLABS - len(mine)
        heir = start_engine("rollout", "r1", "scheduler")
        assert heir.ask("acquire", NUM_SLABS) == list(range(len(mine), NUM_SLABS))
        assert watcher.ledger.owned(serving.slot) == mine


@pytest.mark.slow
def test_an_engine_that_died_without_a_daemon_is_buried_by_the_next_one(
    daemons: Daemons, start_engine: StartEngine, runtime_dir: Path
) -> None:
    serving = start_engine("serving", "s0", "scheduler")
    rollout = start_engine("rollout", "r0", "scheduler")
    with observe(runtime_dir) as watcher:
        mine, theirs = rollout.ask("acquire", 5), serving.ask("acquire", 4)
        watcher.ledger.set_serving_use(serving.slot, used=4, reserved=0)
        daemons.kill()
        serving.kill()
        assert watcher.ledger.owned(serving.slot) == theirs
        daemons.start()
        assert serving.slot not in watcher.ledger.engines()
        assert watcher.ledger.num_free == NUM_SLABS - len(mine)
        assert watcher.ledger.serving_used_slabs == 0
        assert watcher.ledger.count(LedgerWord.EXIT_FREED_SLABS, 0) == len(theirs)
        wait_all_back(watcher.ledger)
    assert start_engine("serving", "s1", "scheduler").slot == serving.slot


@pytest.mark.slow
def test_an_engine_that_lost_a_rank_stays_in_quarantine_across_restarts(
    sharded: Daemons, start_engine: StartEngine, runtime_dir: Path
) -> None:
    serving = tensor_parallel(start_engine, "serving", "s0")
    slabs = serving[0].ask("acquire", 3)
    with observe(runtime_dir) as watcher:
        ledger = watcher.ledger
        sharded.kill()
        serving[1].kill()
        for _ in range(2):
            sharded.start()
            assert ledger.engines()[serving[0].slot].is_leaving
            assert (ledger.num_quarantined, ledger.owned(serving[0].slot)) == (3, slabs)
            with pytest.raises(PoolError, match=r"serving engine 's0' .* is leaving"):
                attach(runtime_dir, Role.SERVING, "s0", kind=Kind.WORKER, world_size=2, timeout_s=0.2)
            sharded.kill()
        sharded.start()
        for process in (serving[0], serving[2]):
            process.kill()
        wait_until(ledger, lambda: ledger.num_free == NUM_SLABS)
        assert ledger.num_quarantined == 0


def test_without_survivors_the_pool_is_made_anew_in_any_size(
    daemons: Daemons, start_engine: StartEngine, runtime_dir: Path
) -> None:
    engines = [start_engine("serving", "s0", "scheduler"), start_engine("rollout", "r0", "scheduler")]
    for engine in engines:
        engine.ask("acquire", 5)
    daemons.kill()
    for engine in engines:
        engine.kill()
    assert (runtime_dir / "pool-p.state").exists()
    daemons.start(num_slabs=8)
    with observe(runtime_dir) as watcher:
        assert (watcher.ledger.num_free, watcher.ledger.num_slabs, watcher.ledger.engines()) == (8, 8, {})
    assert not (runtime_dir / "pool-p.state").exists()


@pytest.mark.slow
def test_a_pool_of_another_size_than_the_surviving_one_is_refused(
    daemons: Daemons, start_engine: StartEngine, runtime_dir: Path
) -> None:
    engine = start_engine("serving", "s0", "scheduler")
    daemons.kill()
    for sizes in ({"num_slabs": 8}, {"slab_bytes": 2 * SLAB_BYTES}, {"headroom_slabs": 1}):
        with pytest.raises(PoolError) as refusal:
            daemons.start(**sizes)
        usual = f"--num-slabs {NUM_SLABS} --slab-bytes {SLAB_BYTES} --headroom-slabs {HEADROOM_SLABS}"
        flag, number = next(iter(sizes.items()))
        assert f"lives on in processes {engine.process.pid} with {usual}" in str(refusal.value)
        assert f"--{flag.replace('_', '-')} {number}" in str(refusal.value)
    daemons.start()
    assert describe_pool(POOL, runtime_dir=runtime_dir).num_slabs == NUM_SLABS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_daemon_leaves_living_engines_to_the_next_one(
    daemons: Daemons, start_engine: StartEngine, runtime_dir: Path, number: signal.Signals
) -> None:
    engine = start_engine("serving", "s0", "scheduler")
    slabs = engine.ask("acquire", 3)
    os.kill(daemons._current.pid, number)
    assert daemons._current._process.wait(PATIENCE_S) == 0
    assert {path.name for path in runtime_dir.iterdir()} == {"pool-p.state"}
    daemons.start()
    with observe(runtime_dir) as watcher:
        assert watcher.ledger.owned(engine.slot) == slabs


@pytest.mark.slow
def test_two_daemons_on_one_pool_are_refused_after_a_restart_as_well(
    daemons: Daemons, start_engine: StartEngine, runtime_dir: Path
) -> None:
    start_engine("serving", "s0", "scheduler")
    daemons.restart()
    with pytest.raises(PoolError, match="pool already owned: p has a running daemon"):
        start_pool(runtime_dir)


def test_newcomers_wait_while_a_daemon_looks_for_the_memory(
    daemons: Daemons, start_engine: StartEngine, runtime_dir: Path
) -> None:
    engine = start_engine("serving", "s0", "scheduler")
    daemons.kill()
    os.kill(engine.process.pid, signal.SIGSTOP)  # an engine whose threads don't get to run
    with ThreadPoolExecutor() as threads:
        starting = threads.submit(daemons.start)
        joining = threads.submit(attach, runtime_dir)
        wait_taking_over(runtime_dir)
        os.kill(engine.process.pid, signal.SIGCONT)
        starting.result()
        with joining.result() as newcomer:
            assert newcomer.ledger.engines().keys() == {engine.slot, newcomer.slot}


def test_a_survivor_that_dies_before_it_hands_over_makes_way_for_a_new_pool(
    daemons: Daemons, start_engine: StartEngine, runtime_dir: Path
) -> None:
    engine = start_engine("serving", "s0", "scheduler")
    engine.ask("acquire", 5)
    daemons.kill()
    os.kill(engine.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        starting = threads.submit(daemons.start)
        wait_taking_over(runtime_dir)
        engine.kill()
        starting.result()
    with observe(runtime_dir) as watcher:
        assert (watcher.ledger.num_free, watcher.ledger.engines()) == (NUM_SLABS, {})


def test_engines_that_do_not_hand_over_in_time_are_named(
    runtime_dir: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_pool(runtime_dir):
        engine = start_engine("serving", "s0", "scheduler")
        os.kill(engine.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(owner, "HAND_OVER_TIMEOUT_S", 0.1)
    size = PoolSize(num_slabs=NUM_SLABS, slab_bytes=SLAB_BYTES, headroom_slabs=HEADROOM_SLABS)
    reason = rf"processes {engine.process.pid} have its memory and none of"
    heir = PoolOwner(name=POOL, size=size, runtime_dir=runtime_dir)
    with heir, pytest.raises(PoolError, match=reason):
        heir.open()
    assert (runtime_dir / "pool-p.state").exists()


def test_leaving_works_after_a_restart_and_without_a_daemon(daemons: Daemons, runtime_dir: Path) -> None:
    before = set(threading.enumerate())
    with attach(runtime_dir, Role.SERVING, "s0") as serving:
        with attach(runtime_dir) as rollout:
            rollout.ledger.acquire(rollout.slot, 5)
            heir = daemons.restart()
            wait_all_back(serving.ledger)
            # The ledger says so before the daemon's answer has been read here.
            wait_until(serving.ledger, lambda: rollout.daemon_pid == heir.pid)
        wait_until(serving.ledger, lambda: rollout.slot not in serving.ledger.engines())
        assert serving.ledger.num_free == NUM_SLABS
        daemons.kill()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "rose-pool-link"]


def test_a_broken_connection_heals_and_frees_nothing(daemons: Daemons, runtime_dir: Path) -> None:
    connection, fds = attach_raw(runtime_dir)
    memory = PoolMemory(fds)
    taken = memory.ledger.acquire(1, 2)
    connection.close()
    wait_until(memory.ledger, lambda: memory.ledger.engines()[1].is_leaving)
    assert memory.ledger.num_quarantined == 2
    with pytest.raises(PoolError, match="is leaving"):
        attach(runtime_dir, timeout_s=0.2)
    connection, _ = come_back(runtime_dir, memory.fds)
    assert memory.ledger.owned(1) == taken
    assert (memory.ledger.num_quarantined, memory.ledger.engines()[1].is_leaving) == (0, False)
    connection.close()
    memory.close()


def test_a_process_that_says_hello_anew_is_not_waited_for(daemons: Daemons, runtime_dir: Path) -> None:
    connection, fds = attach_raw(runtime_dir)  # as an engine whose daemon dies before it is welcomed
    connection.close()
    for fd in fds:
        os.close(fd)
    daemons.kill()
    with ThreadPoolExecutor() as threads:
        starting = threads.submit(daemons.start)
        again, fds = attach_again(runtime_dir)
        starting.result()
    with observe(runtime_dir) as watcher:
        assert (watcher.ledger.num_free, list(watcher.ledger.engines())) == (NUM_SLABS, [1])
    again.close()
    for fd in fds:
        os.close(fd)


def test_only_the_pools_own_memory_is_taken_over(daemons: Daemons, runtime_dir: Path) -> None:
    connection, fds = attach_raw(runtime_dir)
    daemons.kill()
    size = PoolSize(num_slabs=NUM_SLABS, slab_bytes=SLAB_BYTES, headroom_slabs=HEADROOM_SLABS)
    other = PoolMemory.create(POOL, size)
    with ThreadPoolExecutor() as threads:
        starting = threads.submit(daemons.start)
        wait_taking_over(runtime_dir)
        for forged in (other.fds, [*fds[:2], other.fds[2]], fds[:2], [], [*fds[1:], fds[0]]):
            refuse_back(
                runtime_dir, forged, f"the {len(forged)} descriptors handed over are not pool p's memory"
            )
        assert not starting.done()
        come_back(runtime_dir, fds)[0].close()
        starting.result()
    refuse_back(runtime_dir, other.fds, "are not pool p's memory")  # from a later survivor neither
    come_back(runtime_dir, fds)[0].close()
    connection.close()
    other.close()
    for fd in fds:
        os.close(fd)


def test_a_stranger_can_not_come_back_as_an_engine(
    daemons: Daemons, start_engine: StartEngine, runtime_dir: Path
) -> None:
    engine = start_engine("rollout", "raw", "scheduler")
    with observe(runtime_dir) as watcher:
        refuse_back(
            runtime_dir, watcher._memory.fds, rf"has no scheduler .* with pid {os.getpid()} in slot 1"
        )
        assert watcher.ledger.engines()[engine.slot].pid == engine.process.pid


def test_an_engine_of_a_pool_that_was_made_anew_goes_on_alone(
    daemons: Daemons, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rose.memory.pool.link")
    with attach(runtime_dir) as client:
        taken = client.ledger.acquire(client.slot, 2)
        daemons.kill()
        (runtime_dir / "pool-p.state").unlink()
        daemons.start()
        wait_until(client.ledger, lambda: "the pool is a new one; restart the engine" in caplog.text)
        assert client.ledger.owned(client.slot) == taken
        with observe(runtime_dir) as watcher:
            assert watcher.ledger.num_free == NUM_SLABS
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_loss_and_return_are_one_line_each(
    daemons: Daemons, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rose.memory.pool.link")
    with attach(runtime_dir) as client:
        daemons.restart()
        wait_until(client.ledger, lambda: "back at the daemon of pool-p slot=1" in caplog.text)
    assert [record.getMessage().split(" of ")[0] for record in caplog.records] == [
        "lost the daemon",
        "back at the daemon",
    ]
