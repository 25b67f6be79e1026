"""Stall clocks: what counts as standing still and what does not."""

import pytest

from rose.admission.stall import StallTracker


def test_requests_in_slots_stall_when_no_step_runs() -> None:
    tracker = StallTracker(2.0)
    tracker.observe({"a"}, 10.0)
    tracker.stepped(10.5)
    tracker.observe({"a", "b"}, 11.0)
    assert tracker.stalled(12.4) == ()
    assert tracker.stalled(12.5) == ("a",)
    assert tracker.stalled(13.0) == ("a", "b")


def test_waiting_behind_other_requests_steps_does_not_count() -> None:
    tracker = StallTracker(2.0)
    for second in range(0, 200, 5):  # each step, of others' prefill alone, takes longer than the timeout
        tracker.observe({"long prefill", "behind it"}, float(second))
        assert tracker.stalled(float(second)) == ()
        tracker.stepped(second + 4.9)
    assert set(tracker.stalled(201.9)) == {"long prefill", "behind it"}  # serving has kept the GPU since


def test_waiting_for_a_slot_does_not_count() -> None:
    tracker = StallTracker(2.0)
    tracker.observe({"running"}, 0.0)
    tracker.observe({"running", "queued"}, 5.0)  # it got a slot only now
    tracker.stepped(5.0)
    assert tracker.stalled(6.9) == ()
    assert set(tracker.stalled(7.0)) == {"running", "queued"}


def test_a_request_starts_anew_with_its_next_slot() -> None:
    tracker = StallTracker(2.0)
    tracker.observe({"a"}, 0.0)
    tracker.observe(set(), 1.9)
    tracker.observe({"a"}, 5.0)
    assert tracker.stalled(6.9) == ()
    assert tracker.stalled(7.0) == ("a",)


def test_a_request_that_memory_refuses_stalls_while_others_step() -> None:
    tracker = StallTracker(2.0)
    tracker.observe(["stepping", "preempted", "without blocks"], 0.0)
    tracker.stepped(1.0, refused=["preempted"])
    refused = ["preempted", "without blocks"]
    tracker.stepped(1.9, refused)
    assert tracker.stalled(1.9) == ()
    tracker.stepped(2.0, refused)
    assert tracker.stalled(2.0) == ("preempted",)
    tracker.stepped(3.0, refused)
    assert tracker.stalled(3.0) == ("preempted", "without blocks")
    tracker.stepped(3.1)  # there is memory again
    assert tracker.stalled(3.1) == ()


def test_deactivated_time_does_not_count() -> None:
    tracker = StallTracker(2.0)
    tracker.observe({"a"}, 0.0)
    tracker.deactivate(1.0)
    tracker.deactivate(50.0)  # still the same pause
    assert tracker.stalled(100.0) == ()
    tracker.activate(100.0)
    assert tracker.stalled(100.9) == ()
    assert tracker.stalled(101.0) == ("a",)


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        StallTracker(0)
