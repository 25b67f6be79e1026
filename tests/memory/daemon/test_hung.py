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
from rose.memory.daemon.hung import HUNG_LOOKS, HungEngines
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


def look(engines: HungEngines, ledger: Ledger, times: int) -> dict[int, int]:
    """Returns what the last one of so many looks finds; the others must find nothing."""
    for _ in range(times - 1):
        assert engines.find(ledger) == {}
    return engines.find(ledger)


def test_an_engine_that_gives_nothing_of_a_cut_while_serving_waits_hangs(ledger: Ledger) -> None:
    engines = HungEngines()
    assert look(engines, ledger, HUNG_LOOKS) == {ROLLOUT: 2}
    assert look(engines, ledger, HUNG_LOOKS) == {ROLLOUT: 2}, "its processes take long to end"


def test_an_engine_does_not_hang_before_serving_has_waited_long_enough_in_one_piece(ledger: Ledger) -> None:
    engines = HungEngines()
    assert look(engines, ledger, HUNG_LOOKS - 1) == {}
    ledger.want(SERVING, 0)  # its request was aborted
    assert look(engines, ledger, 2 * HUNG_LOOKS) == {}
    ledger.want(SERVING, 10)
    assert look(engines, ledger, HUNG_LOOKS - 1) == {}


def test_an_engine_that_gives_slabs_one_by_one_does_not_hang_until_it_stops(ledger: Ledger) -> None:
    engines = HungEngines()
    ledger.begin_rl_step(2, 2)
    for slab in range(5):
        assert look(engines, ledger, HUNG_LOOKS - 1) == {}
        ledger.drain([slab], 1)
        ledger.release(slab)
        ledger.acquire(SERVING, 1)
        ledger.want(SERVING, 16)
    ledger.drain([5], 1)  # which its worker does not unmap
    assert look(engines, ledger, HUNG_LOOKS) == {ROLLOUT: 3}


def test_an_engine_within_its_budget_and_one_beside_free_slabs_do_not_hang(ledger: Ledger) -> None:
    engines = HungEngines()
    ledger.begin_rl_step(2, 10)
    assert look(engines, ledger, 2 * HUNG_LOOKS) == {}
    ledger.begin_rl_step(3, 8)
    ledger.drain(ledger.owned(SERVING)[:4], 0)
    ledger.want(SERVING, 6)
    assert look(engines, ledger, 2 * HUNG_LOOKS) == {}


def test_of_two_engines_the_one_above_its_share_hangs(ledger: Ledger) -> None:
    ledger.drain([0, 1, 2], 0)
    ledger.set_engine(OTHER, EngineSlot(role=Role.ROLLOUT, pid=3, world_size=1))
    ledger.acquire(OTHER, 3)
    assert look(HungEngines(), ledger, HUNG_LOOKS) == {ROLLOUT: 2}


@pytest.fixture
def quick_pool(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A pool that looks 15 times within 0.3 s, in this process."""
    monkeypatch.setattr(hung, "HUNG_LOOKS", 15)
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
