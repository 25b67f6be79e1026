"""Jobs that take longer than their files say, with a clock of the test's own."""

from typing import Any

import pytest
from lone_scheduler import HOUR_S, Scheduler, long_job, only

from rose.scheduler.runtime.channel.messages import Answer, Cancel, Completed, Granted, Hello, Release, Status

NUM_HOLDS = 3


class Drifting:
    """a and b in one group; the phases of a take as long as a test says."""

    def __init__(self, slo: float, group: str | None = None, of_a: dict[str, Any] | None = None) -> None:
        self.scheduler = Scheduler(groups={"main": {}} if group is not None else {})
        self.scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
        for name, fields in (("a", of_a), ("b", None)):
            job = long_job(name, **{"slo": slo, "group": group, **(fields or {})})
            reply = only(Answer, self.scheduler.submit(name, **job))
            assert reply.error is None
        self.first_group = self.group("a")
        assert self.group("b") == self.first_group

    def group(self, name: str) -> str:
        return str(self.scheduler.job(name)["group"])

    def note(self, name: str) -> str:
        return str(self.scheduler.job(name)["note"])

    def run_phase(self, phase: str, iteration: int, seconds: float) -> None:
        grants = [each for each in self.scheduler.request("a", phase, iteration) if isinstance(each, Granted)]
        while not grants:  # its turn in the timetable
            self.scheduler.now += HOUR_S / 4
            self.scheduler.control.tick(self.scheduler.now)
            grants = [
                each for each in self.scheduler.request("a", phase, iteration) if isinstance(each, Granted)
            ]
        [grant] = grants
        self.scheduler.now += seconds
        fields: dict[str, Any] = {"job": "a", "attempt": 1, "phase": phase, "epoch": grant.epoch}
        answers = self.scheduler.call(Release, **fields, client="a")
        assert only(Answer, answers).error is None

    def iterate(
        self, first: int, count: int, rollout_s: float, rewards_s: float = 0.0, checkpoint_s: float = 0.0
    ) -> dict[str, Any]:
        """What the job is told when the last one is safe."""
        body: dict[str, Any] = {}
        for iteration in range(first, first + count):
            self.run_phase("rollout", iteration, rollout_s)
            self.scheduler.now += rewards_s
            self.run_phase("train", iteration, HOUR_S)
            self.scheduler.now += checkpoint_s
            answers = self.scheduler.call(Completed, job="a", attempt=1, iteration=iteration, client="a")
            body = dict(only(Answer, answers).body)
        return body


def test_a_group_with_room_is_certified_with_the_times_that_were_measured() -> None:
    drifting = Drifting(slo=5.0)
    assert drifting.iterate(0, NUM_HOLDS - 1, 1.5 * HOUR_S)["group"] == drifting.first_group
    assert drifting.note("a") == ""
    assert drifting.iterate(NUM_HOLDS - 1, 1, 1.6 * HOUR_S)["group"] == drifting.first_group
    assert drifting.note("a") == "rollout takes 5760 s, its file says 3600: certified again in group-1"
    drifting.iterate(NUM_HOLDS, NUM_HOLDS, 1.6 * HOUR_S)
    assert "5760" in drifting.note("a"), "the new times are its file's now, and not too short"
    assert drifting.note("b") == ""


def test_time_outside_of_phases_drifts_as_phases_do() -> None:
    phases = {**long_job("a")["phases"], "checkpoint": {"seconds": 600.0}}
    drifting = Drifting(slo=5.0, of_a={"phases": phases, "outside": {"after_train_s": 300.0}})
    drifting.iterate(0, NUM_HOLDS + 1, HOUR_S, checkpoint_s=950.0)
    assert drifting.note("a") == "", "within the margin of 900 s"
    drifting.iterate(NUM_HOLDS + 1, NUM_HOLDS, HOUR_S, rewards_s=1200.0, checkpoint_s=1800.0)
    said = "the time after rollout takes 1200 s, its file says 0: certified again in group-1"
    assert drifting.note("a") == said
    drifting.iterate(2 * NUM_HOLDS + 1, 1, HOUR_S, rewards_s=1200.0, checkpoint_s=1800.0)
    said = "the time after train takes 1800 s, its file says 900: certified again in group-1"
    assert drifting.note("a") == said
    drifting.iterate(2 * NUM_HOLDS + 2, NUM_HOLDS + 1, HOUR_S, rewards_s=1200.0, checkpoint_s=1800.0)
    assert drifting.note("a") == said, "the new times are its file's now"
    spec = drifting.scheduler.control._state.specs["a"]
    assert (spec.outside.after_train_s, spec.phases["checkpoint"].seconds) == (1200.0, 600.0)


def test_what_is_left_of_a_lifetimes_slo_is_that_of_the_measured_times() -> None:
    drifting = Drifting(slo=5.0, of_a={"slo": 1.2, "slo_kind": "lifetime"})
    assert drifting.iterate(0, NUM_HOLDS, 1.6 * HOUR_S)["group"] == drifting.first_group
    assert "certified again in group-1" in drifting.note("a"), "2.6 h are within 1.2 x 2.6 h"


def test_a_group_without_room_is_left_by_the_job_that_drifted_alone() -> None:
    drifting = Drifting(slo=1.2)
    body = drifting.iterate(0, NUM_HOLDS, 1.8 * HOUR_S)
    assert body["group"] == drifting.group("a") != drifting.first_group
    assert drifting.group("b") == drifting.first_group
    assert f"goes from {drifting.first_group} to {body['group']}" in drifting.note("a")
    [move] = drifting.scheduler.job("a")["moves"]
    assert move["why"].startswith("drifted; ") and move["iteration"] == NUM_HOLDS
    drifting.scheduler.restart(5.0)
    assert drifting.group("a") == body["group"]
    drifting.iterate(NUM_HOLDS, NUM_HOLDS + 1, 1.8 * HOUR_S)
    job = drifting.scheduler.job("a")
    assert (job["restarts"], len(job["moves"])) == (0, 1)


def test_a_job_that_named_its_group_stays_and_says_what_is_wrong() -> None:
    drifting = Drifting(slo=1.2, group="main")
    assert drifting.iterate(0, NUM_HOLDS, 1.8 * HOUR_S)["group"] == "main"
    assert "rollout takes 6480 s, its file says 3600; with that" in drifting.note("a")
    only(Answer, drifting.scheduler.call(Cancel, job="b"))
    assert list(only(Answer, drifting.scheduler.call(Status)).body["groups"]) == ["main"]


@pytest.mark.parametrize("rollout_s", [0.5 * HOUR_S, 1.09 * HOUR_S])
def test_times_within_the_margin_change_nothing(rollout_s: float) -> None:
    drifting = Drifting(slo=1.2)
    drifting.iterate(0, 2 * NUM_HOLDS, rollout_s)
    assert drifting.note("a") == ""
    assert drifting.group("a") == drifting.first_group


def test_one_iteration_that_is_too_long_is_no_drift() -> None:
    drifting = Drifting(slo=1.2)
    for begin in (0, NUM_HOLDS):
        drifting.iterate(begin, NUM_HOLDS - 1, 2.0 * HOUR_S)
        drifting.iterate(begin + NUM_HOLDS - 1, 1, HOUR_S)
    assert drifting.note("a") == ""
