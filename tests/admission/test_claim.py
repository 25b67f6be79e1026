"""Who may compute on a GPU, whatever the order of events: the whole protocol is searched, state by state."""

from collections import defaultdict

import pytest
from claim_model import NUM, At, Guest, Model, State, explore
from hypothesis import given
from hypothesis import strategies as st

from rose.admission import claim as rules
from rose.admission.claim import MAX_GUESTS, MAX_SERVING, ServingState


@pytest.fixture(scope="module")
def found() -> dict[State, list[State]]:
    states, fault = explore(Model())
    assert fault is None
    return states


@pytest.mark.slow
def test_no_order_of_steps_deaths_and_stops_lets_two_compute_at_once_or_passes_a_guest_twice(
    found: dict[State, list[State]],
) -> None:
    assert len(found) > 10_000
    assert any(At.STEP in state.servings for state in found)


@pytest.mark.slow
def test_from_every_state_each_process_that_lives_gets_to_compute(found: dict[State, list[State]]) -> None:
    before = defaultdict(list)
    for state, nexts in found.items():
        for after in nexts:
            before[after].append(state)
    for slot in range(NUM):
        serves = {state for state in found if state.servings[slot] is At.STEP}
        computes = {state for state in found if state.guests[slot].at is At.COMPUTES}
        assert reaching(before, serves) == found.keys() == reaching(before, computes)


def reaching(before: dict[State, list[State]], goals: set[State]) -> set[State]:
    """The states from which one of the goals can be reached without a death."""
    reached = set(goals)
    queue = list(goals)
    while queue:
        for state in before[queue.pop()]:
            if state not in reached:
                reached.add(state)
                queue.append(state)
    return reached


class ServingDoesNotWait(Model):
    def must_wait(self, state: State) -> bool:
        return False


class ReleasesAnyClaim(Model):
    def released(self, claim: int, guest: int) -> int:
        return claim & 0xFF


class TakesOnAnOldDecision(Model):
    def may_take(self, state: State, guest: Guest) -> bool:
        return rules.guest_of(state.claim) < 0


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (ServingDoesNotWait(), "a serving engine and a guest compute at once"),
        (ReleasesAnyClaim(), "compute at once"),
        (TakesOnAnOldDecision(), "a serving engine and a guest compute at once"),
    ],
    ids=["no wait", "any release", "old decision"],
)
def test_the_search_finds_a_protocol_with_a_fault(model: Model, fault: str) -> None:
    assert fault in (explore(model)[1] or "")


@given(
    st.lists(st.sampled_from(ServingState), min_size=MAX_SERVING, max_size=MAX_SERVING),
    st.integers(0, MAX_GUESTS - 1),
    st.integers(0, (1 << 47) - 9),
)
@pytest.mark.slow
def test_the_word_keeps_what_each_engine_published(
    states: list[ServingState], guest: int, count: int
) -> None:
    claim = count << 16
    for slot, state in enumerate(states):
        claim = rules.with_state(claim, slot, state)
    assert [rules.state_of(claim, slot) for slot in range(MAX_SERVING)] == states
    assert rules.has_work(claim) == any(states)
    assert rules.is_open(claim) == rules.is_open(rules.released(rules.taken(claim, guest), guest)) or any(
        state is ServingState.GRANTED for state in states
    )
    taken = rules.taken(claim, guest)
    used_up = [ServingState.OPEN if state is ServingState.GRANTED else state for state in states]
    assert [rules.state_of(taken, slot) for slot in range(MAX_SERVING)] == used_up
    assert rules.guest_of(taken) == guest and 0 <= taken < 1 << 63
    assert rules.released(taken, (guest + 1) % MAX_GUESTS) == taken
    assert rules.guest_of(rules.released(taken, guest)) == -1
