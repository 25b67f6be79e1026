"""The ledger: random transitions against a model, and whole after every one of them."""

import dataclasses
import mmap
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rose._shm import Words
from rose.errors import PoolError
from rose.memory.ledger.ledger import EngineSlot, Ledger
from rose.memory.ledger.ledger_words import LedgerWord, ledger_bytes
from rose.memory.ledger.policy_word import PolicyState, Pressure
from rose.memory.ledger.slab_word import MAX_SLOT, SlabState
from rose.types import Role

NUM_SLABS = 7
SLOTS = (1, 2)


def make_ledger(num_slabs: int = NUM_SLABS) -> tuple[Ledger, mmap.mmap]:
    memory = mmap.mmap(-1, ledger_bytes(num_slabs))
    ledger = Ledger.create(memory, num_slabs=num_slabs, slab_bytes=4096, headroom_slabs=2)
    ledger.set_engine(1, EngineSlot(role=Role.SERVING, pid=10, world_size=1))
    ledger.set_engine(2, EngineSlot(role=Role.ROLLOUT, pid=20, world_size=2))
    return ledger, memory


class LedgerMachine(RuleBasedStateMachine):
    """Two engines and a daemon on one ledger, each call through another view of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        _, memory = make_ledger()
        self.views = [Ledger(memory), Ledger(memory)]
        # slab -> (state, slot, pending, epoch)
        self.model = {slab: (SlabState.FREE, 0, 0, 0) for slab in range(NUM_SLABS)}

    def slabs_in(self, *states: SlabState) -> list[int]:
        return [slab for slab, entry in self.model.items() if entry[0] in states]

    @rule(slot=st.sampled_from(SLOTS), count=st.integers(0, NUM_SLABS + 1))
    def acquire(self, slot: int, count: int) -> None:
        free = self.slabs_in(SlabState.FREE)
        taken = self.views[slot - 1].acquire(slot, count)
        assert taken == free[:count]
        for slab in taken:
            self.model[slab] = (SlabState.OWNED, slot, 0, self.model[slab][3])

    @rule(slab=st.integers(0, NUM_SLABS - 1), num_ranks=st.integers(0, 3))
    def drain(self, slab: int, num_ranks: int) -> None:
        state, slot, _, epoch = self.model[slab]
        ledger = self.views[0]
        if state is not SlabState.OWNED:
            with pytest.raises(PoolError, match=f"slab {slab}: can't drain, it is {state.name}"):
                ledger.drain([slab], num_ranks)
            return
        ledger.drain([slab], num_ranks)
        if num_ranks:
            self.model[slab] = (SlabState.DRAINING, slot, num_ranks, epoch)
        else:
            self.model[slab] = (SlabState.FREE, 0, 0, epoch + 1)

    @rule(slab=st.integers(0, NUM_SLABS - 1))
    def release(self, slab: int) -> None:
        state, slot, pending, epoch = self.model[slab]
        ledger = self.views[1]
        if state is not SlabState.DRAINING:
            with pytest.raises(PoolError, match=f"slab {slab}: can't release, it is {state.name}"):
                ledger.release(slab)
            return
        assert ledger.release(slab) is (pending == 1)
        if pending > 1:
            self.model[slab] = (state, slot, pending - 1, epoch)
        else:
            self.model[slab] = (SlabState.FREE, 0, 0, epoch + 1)

    @precondition(lambda self: self.slabs_in(SlabState.OWNED, SlabState.DRAINING))
    @rule(slot=st.sampled_from(SLOTS))
    def force_free(self, slot: int) -> None:
        held = [slab for slab, entry in self.model.items() if entry[1] == slot]
        assert self.views[0].force_free(slot) == held
        for slab in held:
            self.model[slab] = (SlabState.FREE, 0, 0, self.model[slab][3] + 1)

    @invariant()
    def agrees_with_model(self) -> None:
        for ledger in self.views:
            ledger.check_integrity()
            for slab, (state, slot, pending, epoch) in self.model.items():
                entry = ledger.entry(slab)
                assert (entry.state, entry.slot, entry.num_pending, entry.epoch) == (
                    state,
                    slot,
                    pending,
                    epoch,
                )
            assert ledger.num_free == len(self.slabs_in(SlabState.FREE))
            assert ledger.num_draining == len(self.slabs_in(SlabState.DRAINING))
            for slot in SLOTS:
                owned = [s for s, e in self.model.items() if e[:2] == (SlabState.OWNED, slot)]
                assert ledger.owned(slot) == owned and ledger.num_owned(slot) == len(owned)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedgerAgainstModel = LedgerMachine.TestCase


def test_threads_never_own_the_same_slab() -> None:
    ledger, memory = make_ledger(num_slabs=32)
    held: list[set[int]] = [set(), set()]
    errors: list[BaseException] = []

    def churn(slot: int) -> None:
        view, mine = Ledger(memory), held[slot - 1]
        try:
            for round_ in range(300):
                mine.update(view.acquire(slot, 20))
                assert all(view.entry(slab).slot == slot for slab in mine)
                back = sorted(mine)[: 10 + round_ % 10]
                mine.difference_update(back)
                view.drain(back, 1)
                for slab in back:
                    assert view.release(slab)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(slot,)) for slot in SLOTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    ledger.check_integrity()
    assert [set(ledger.owned(slot)) for slot in SLOTS] == held


def test_epoch_wraps_instead_of_overflowing() -> None:
    ledger, memory = make_ledger()
    Words(memory).store(LedgerWord.SLABS, 0x7FFF_FFFF << 32)
    assert ledger.entry(0).epoch == 0x7FFF_FFFF
    ledger.drain(ledger.acquire(1, 1), 0)
    assert ledger.entry(0).epoch == 0
    ledger.check_integrity()


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (7, "has no state"),
        (1 << 8, "FREE slot=1 .* is invalid"),
        (9 << 8 | SlabState.OWNED, "OWNED slot=9 .* is invalid"),
        (1 << 8 | SlabState.DRAINING, "DRAINING slot=1 pending=0 .* is invalid"),
        (1 << 16 | 1 << 8 | SlabState.OWNED, "OWNED slot=1 pending=1 .* is invalid"),
        (-1 << 32 | 1 << 8 | SlabState.OWNED, "epoch=-1 is invalid"),
    ],
)
def test_integrity_check_finds_words_that_mean_nothing(word: int, reason: str) -> None:
    ledger, memory = make_ledger()
    Words(memory).store(LedgerWord.SLABS + 3, word)
    with pytest.raises(PoolError, match=f"slab 3: .*{reason}"):
        ledger.check_integrity()


def test_other_layouts_are_refused() -> None:
    _, memory = make_ledger()
    Words(memory).store(LedgerWord.VERSION, 99)
    with pytest.raises(PoolError, match="version 99"):
        Ledger(memory)
    with pytest.raises(PoolError, match="layout 0x0"):
        Ledger(mmap.mmap(-1, ledger_bytes(1)))


def test_policy_changes_notify_and_serving_figures_do_not() -> None:
    ledger, memory = make_ledger()
    other = Ledger(memory)
    seen = ledger.change_seq
    ledger.begin_rl_step(3, 5)
    assert other.policy == PolicyState(rl_step=3, rollout_budget_slabs=5)
    assert other.change_seq == seen + 1
    assert ledger.swap_policy(ledger.policy, ledger.policy)
    assert other.change_seq == seen + 1
    frozen = PolicyState(rl_step=4, rollout_budget_slabs=5, pressure=Pressure.FROZEN)
    assert ledger.swap_policy(ledger.policy, frozen)
    assert other.policy == frozen
    assert other.change_seq == seen + 2
    seen += 1
    ledger.set_serving_use(1, used=4, reserved=6)
    assert other.change_seq == seen + 1
    assert (other.serving_used_slabs, other.serving_reserve_slabs) == (4, 6)
    ledger.set_serving_use(3, used=2, reserved=1)  # a second serving engine
    assert (other.serving_used_slabs, other.serving_reserve_slabs) == (6, 7)


def test_serving_is_told_when_rollouts_lack_more_than_is_free_and_a_dead_engine_wants_nothing() -> None:
    ledger, memory = make_ledger()
    other = Ledger(memory)
    ledger.set_engine(2, EngineSlot(role=Role.ROLLOUT, pid=1, world_size=1))
    ledger.acquire(2, 3)
    seen = ledger.change_seq
    ledger.want(2, 3 + ledger.num_free)
    assert (other.rollout_lacks, other.change_seq) == (ledger.num_free, seen)
    ledger.want(2, 4 + ledger.num_free)
    assert (other.rollout_lacks, other.change_seq) == (ledger.num_free + 1, seen + 1)
    ledger.vacate(2)
    assert other.rollout_lacks == 0


def test_a_serving_engine_hears_what_all_others_lack_but_not_what_it_lacks_itself() -> None:
    ledger, _ = make_ledger()
    for slot, role in ((1, Role.SERVING), (2, Role.ROLLOUT), (3, Role.SERVING)):
        ledger.set_engine(slot, EngineSlot(role=role, pid=1, world_size=1))
    ledger.acquire(1, 2)
    for slot, wanted in ((1, 4), (2, 3), (3, 1)):
        ledger.want(slot, wanted)
    assert [ledger.others_lack(slot) for slot in (1, 2, 3)] == [4, 3, 5]
    assert ledger.rollout_lacks == 3


def test_a_cut_of_the_last_step_can_not_undo_a_new_steps_budget() -> None:
    ledger, memory = make_ledger()
    ledger.begin_rl_step(1, 6)
    serving = Ledger(memory)
    seen = serving.policy
    cut = dataclasses.replace(seen, rollout_budget_slabs=3, pressure=Pressure.PRESSURE)
    ledger.begin_rl_step(2, 6)
    assert not serving.swap_policy(seen, cut)
    assert serving.policy == PolicyState(rl_step=2, rollout_budget_slabs=6, pressure=Pressure.NORMAL)
    assert serving.swap_policy(serving.policy, cut)
    assert ledger.policy == cut


@pytest.mark.parametrize("state", [{"rl_step": -1}, {"rl_step": 1 << 31}, {"rollout_budget_slabs": 1 << 24}])
def test_policy_state_that_does_not_fit_its_word_is_refused(state: dict[str, int]) -> None:
    ledger, _ = make_ledger()
    with pytest.raises(ValueError, match="must be >= 0 and below"):
        ledger.swap_policy(ledger.policy, PolicyState(**state))  # type: ignore[arg-type]


def test_waiters_wake_on_notify_and_return_after_the_timeout() -> None:
    ledger, memory = make_ledger()
    seen = ledger.change_seq
    assert ledger.wait_change(seen, 0.001) == seen
    woken: list[int] = []

    def wait() -> None:
        view, now = Ledger(memory), seen
        while now == seen:
            now = view.wait_change(seen, 10.0)
        woken.append(now)

    waiter = threading.Thread(target=wait)
    waiter.start()
    slab = ledger.acquire(2, 1)
    ledger.drain(slab, 1)
    assert ledger.release(slab[0])
    waiter.join(60.0)
    assert woken == [seen + 1]


def test_counters_add_up_across_views() -> None:
    ledger, memory = make_ledger()
    assert ledger.count(LedgerWord.CUTS) == 1
    assert Ledger(memory).count(LedgerWord.CUTS, 2) == 3
    assert ledger.count(LedgerWord.CUTS, 0) == 3
    with pytest.raises(ValueError, match="CHANGE_SEQ is not a counter"):
        ledger.count(LedgerWord.CHANGE_SEQ)


def test_engine_slots_show_who_is_there() -> None:
    ledger, memory = make_ledger()
    assert Ledger(memory).engines() == {
        1: EngineSlot(role=Role.SERVING, pid=10, world_size=1),
        2: EngineSlot(role=Role.ROLLOUT, pid=20, world_size=2),
    }
    ledger.set_engine(1, None)
    assert list(ledger.engines()) == [2]


def test_slabs_of_a_leaving_engine_are_quarantined_whatever_their_state() -> None:
    ledger, memory = make_ledger()
    ledger.acquire(1, 2)
    slabs = ledger.acquire(2, 3)
    ledger.drain(slabs[:1], 2)
    assert ledger.num_quarantined == 0
    rollout = ledger.engines()[2]
    ledger.set_engine(2, dataclasses.replace(rollout, is_leaving=True))
    assert (Ledger(memory).num_quarantined, Ledger(memory).engines()[2].is_leaving) == (3, True)
    ledger.force_free(2)
    assert ledger.num_quarantined == 0
    ledger.set_engine(2, None)
    ledger.set_engine(2, rollout)
    assert not ledger.engines()[2].is_leaving


def test_bad_arguments_are_the_callers_mistake() -> None:
    ledger, _ = make_ledger()
    for call in (
        lambda: ledger.acquire(0, 1),
        lambda: ledger.acquire(MAX_SLOT + 1, 1),
        lambda: ledger.acquire(1, -1),
        lambda: ledger.entry(NUM_SLABS),
        lambda: ledger.release(-1),
        lambda: ledger.drain([0], -1),
    ):
        with pytest.raises(ValueError):
            call()


def test_words_are_counted_by_their_bits_within_the_range_alone() -> None:
    buffer = mmap.mmap(-1, 8 * 6)
    words = Words(buffer)
    for index, value in enumerate((0x102, 0x102, 0x202, 0x101, -1, 0x102)):
        words.store(index, value)
    assert words.count(1, 4, 0xFF, 2) == 2
    assert words.count(0, 6, 0xFF00, 0x100) == 4
    assert words.count(0, 6, -1, -1) == 1
    assert words.count(6, 0, 0, 0) == 0
    for first, num in ((3, 4), (6, 1), (0, 7), (1, 2**63)):
        with pytest.raises((IndexError, TypeError)):
            words.count(first, num, 0, 0)
