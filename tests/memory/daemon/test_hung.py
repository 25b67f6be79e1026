"""A rollout engine that hangs with memory that serving lacks is ended, and one that obeys is not."""

import mmap
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pool_setup import HEADROOM_SLABS, NUM_SLABS, POOL, SLAB_BYTES, StartEngine, attach, wait_until

from rose.memory.daemon import hung, owner
from rose.memory.daemon.hung import HUNG_S, HungEngines
from rose.memory.daemon.owner import PoolOwner
from rose.memory.ledger.ledger import EngineSlot, Ledger
from rose.memory.ledger.ledger_words import ledger_bytes
from rose.memory.pool.pool_memory import PoolSize
from rose.types import Role

SERVING, ROLLOUT, OTHER = 1, 2, 3


@pytest.fixture
def ledger() -> Ledger:
    """Serving lacks 4 of the 16 slabs, and a rollout engine has 10, which is 2 above its budget."""
    made = Ledger.create(
        mmap.mmap(-1, ledger_bytes(NUM_SLABS)), num_slabs=NUM_SLABS, slab_bytes=4096, headroom_slabs=4
    )
    made.set_engine(SERVING, EngineSlot(role=Role.SERVING, pid=1, world_size=1))
    made.set_engine(ROLLOUT, EngineSlot(role=Role.ROLLOUT, pid=2, world_size=1))
    made.acquire(ROLLOUT, 10)
    made.acquire(SERVING, 6)
    made.want(SERVING, 10)
    made.begin_rl_step(1, 8)
    return made


def test_an_engine_that_gives_nothing_of_a_cut_while_serving_waits_hangs(ledger: Ledger) -> None:
    engines = HungEngines()
    assert engines.find(ledger, 100.0) == {}
    assert engines.find(ledger, 100.0 + HUNG_S - 0.1) == {}
    assert engines.find(ledger, 100.0 + HUNG_S) == {ROLLOUT: 2}
    ledger.want(SERVING, 0)  # its request was aborted
    assert engines.find(ledger, 101.0 + HUNG_S) == {}
    ledger.want(SERVING, 10)
    assert engines.find(ledger, 102.0 + HUNG_S) == {ROLLOUT: 2}


def test_an_engine_that_gives_slabs_one_by_one_does_not_hang_until_it_stops(ledger: Ledger) -> None:
    engines = HungEngines()
    ledger.begin_rl_step(2, 2)
    for number in range(5):
        assert engines.find(ledger, number * 0.9 * HUNG_S) == {}
        ledger.drain([number], 1)
        ledger.release(number)
        ledger.acquire(SERVING, 1)
        ledger.want(SERVING, 16)
    ledger.drain([5], 1)  # which its worker does not unmap
    assert engines.find(ledger, 1000.0) == {}
    assert engines.find(ledger, 1000.0 + HUNG_S) == {ROLLOUT: 3}


def test_an_engine_within_its_budget_and_one_beside_free_slabs_do_not_hang(ledger: Ledger) -> None:
    engines = HungEngines()
    ledger.begin_rl_step(2, 10)
    assert (engines.find(ledger, 0.0), engines.find(ledger, 2 * HUNG_S)) == ({}, {})
    ledger.begin_rl_step(3, 8)
    ledger.drain(ledger.owned(SERVING)[:4], 0)
    ledger.want(SERVING, 6)
    assert (engines.find(ledger, 0.0), engines.find(ledger, 2 * HUNG_S)) == ({}, {})


def test_of_two_engines_the_one_above_its_share_hangs(ledger: Ledger) -> None:
    ledger.drain([0, 1, 2], 0)
    ledger.set_engine(OTHER, EngineSlot(role=Role.ROLLOUT, pid=3, world_size=1))
    ledger.acquire(OTHER, 3)
    engines = HungEngines()
    assert (engines.find(ledger, 0.0), engines.find(ledger, HUNG_S)) == ({}, {ROLLOUT: 2})


@pytest.fixture
def quick_pool(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A pool that waits 0.3 s for an engine, in this process."""
    monkeypatch.setattr(hung, "HUNG_S", 0.3)
    monkeypatch.setattr(owner, "_LOOK_S", 0.02)
    size = PoolSize(num_slabs=NUM_SLABS, slab_bytes=SLAB_BYTES, headroom_slabs=HEADROOM_SLABS)
    with PoolOwner(name=POOL, size=size, runtime_dir=runtime_dir) as its:
        its.open()
        thread = threading.Thread(target=its.run)
        thread.start()
        yield
        its.loop.stop()
        thread.join()


def test_serving_gets_the_slabs_of_a_rollout_engine_that_was_stopped(
    quick_pool: None, runtime_dir: Path, start_engine: StartEngine
) -> None:
    stopped, healthy = (start_engine("rollout", name, "scheduler") for name in ("stopped", "healthy"))
    stopped.ask("acquire", NUM_SLABS - 2)
    healthy.ask("acquire", 1)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    with attach(runtime_dir, Role.SERVING) as serving:
        ledger = serving.ledger
        ledger.acquire(serving.slot, 1)
        ledger.want(serving.slot, 8)
        ledger.swap_policy(ledger.policy, replace(ledger.policy, rollout_budget_slabs=2))
        wait_until(ledger, lambda: ledger.num_free == NUM_SLABS - 2)
        assert len(ledger.acquire(serving.slot, 7)) == 7
        assert stopped.process.wait() == -signal.SIGKILL
        assert ledger.slots_of(Role.ROLLOUT) == [healthy.slot] and healthy.process.poll() is None
