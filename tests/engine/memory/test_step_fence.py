"""A slab is held as long as a step that may use it is in flight, and no longer."""

from hypothesis import given
from hypothesis import strategies as st

from rose.engine.memory.step_fence import StepFence


def test_what_is_given_back_between_steps_may_go_at_once() -> None:
    fence = StepFence()
    fence.begin()
    fence.end()
    fence.hold([(3, 3)])
    assert fence.take_passed() == [(3, 3)]
    assert fence.take_passed() == []


def test_what_two_steps_in_flight_may_use_is_held_until_both_have_ended() -> None:
    fence = StepFence()
    fence.begin()
    fence.begin()
    fence.hold([(3, 3), (4, 4)])
    fence.begin()  # it does not know their blocks
    fence.end()
    assert not fence.has_passed
    fence.hold([(5, 5)])
    fence.end()
    assert fence.take_passed() == [(3, 3), (4, 4)]
    fence.end()
    assert fence.take_passed() == [(5, 5)]


@given(st.lists(st.sampled_from(["begin", "end", "hold", "take"])))
def test_no_slab_goes_before_the_steps_in_flight_have_ended_and_all_go_then(events: list[str]) -> None:
    fence = StepFence()
    in_flight: list[int] = []
    users: dict[int, set[int]] = {}
    num_steps = num_held = 0
    for event in events:
        if event == "begin":
            fence.begin()
            in_flight.append(num_steps)
            num_steps += 1
        elif event == "end" and in_flight:
            fence.end()
            in_flight.pop(0)
        elif event == "hold":
            users[num_held] = set(in_flight)
            fence.hold([(num_held, num_held)])
            num_held += 1
        elif event == "take":
            free = [slab for slab, steps in users.items() if not steps & set(in_flight)]
            assert fence.has_passed == bool(free)
            assert fence.take_passed() == [(slab, slab) for slab in free]
            for slab in free:
                del users[slab]
