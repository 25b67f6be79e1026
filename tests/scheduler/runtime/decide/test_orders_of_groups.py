"""The orders that policies find, run by the scheduler itself, with a clock of the test's own."""

from typing import Any

from lone_scheduler import Scheduler, only, spec_of

from rose.scheduler.dashboard.view import state_view
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Cancel,
    Completed,
    Exited,
    Granted,
    Hello,
    Overview,
    Release,
    Submit,
)

LONG, SHORT = (400.0, 100.0), (100.0, 25.0)


def scheduler(policy: str, **cluster: Any) -> Scheduler:
    found = Scheduler(policy=policy, groups={}, **cluster)
    found.call(Hello, client="runner", running={}, log_folder="/logs")
    return found


def submit(
    found: Scheduler, name: str, times_s: tuple[float, float], slo: float, dry_run: bool = False
) -> dict[str, Any]:
    phases = {"rollout": {"seconds": times_s[0]}, "train": {"seconds": times_s[1]}}
    spec = {**spec_of(name), "group": None, "slo": slo, "iterations": 100, "phases": phases}
    answers = found.call(Submit, spec=spec, dry_run=dry_run, client="cli")
    answer = only(Answer, [each for each in answers if isinstance(each, Answer)])
    assert answer.error is None, answer.error
    return dict(answer.body)


def order_in(found: Scheduler, group: str) -> list[str]:
    facts = only(Answer, found.call(Overview)).body["groups"][group]
    return list(facts["order"])


def test_a_short_job_runs_more_often_than_the_long_one_whose_group_it_joins() -> None:
    found = scheduler("lifetime-multirate")
    long = submit(found, "long", LONG, 1.1)
    short = submit(found, "short", SHORT, 1.1)
    assert short["group"] == long["group"], "round-robin would take 500 s, and 137.5 s are allowed"
    assert short["iteration_s"] <= 137.5
    order = order_in(found, short["group"])
    assert order.count("short") > order.count("long") == 1
    facts = only(Answer, found.call(Overview)).body
    [group] = state_view(facts, [])["groups"]
    assert group["problem"] is None and sorted(group["jobs"]) == ["long", "short"]
    assert sum(bar["job"] == "short" for node in group["nodes"] for bar in node["bars"]) > 4


def test_an_order_in_turns_is_the_same_for_the_next_scheduler_and_without_a_job_that_ended() -> None:
    found = scheduler("lifetime-multirate")
    group = submit(found, "long", LONG, 1.1)["group"]
    submit(found, "short", SHORT, 1.1)
    before = order_in(found, group)
    found.restart(found.now)
    assert order_in(found, group) == before
    found.control._state.groups.check_integrity(found.now)
    assert found.control._state.groups.by_name[group].iterations
    found.call(Cancel, job="long")
    found.call(Exited, job="long", attempt=1, exit_status=-15, client="runner")
    assert order_in(found, group) == ["short"], "nothing stays idle for a job that is gone"


def test_a_job_that_drifts_leaves_an_order_in_turns_to_the_others() -> None:
    found = scheduler("lifetime-multirate", lease_s=1e6)
    group = submit(found, "long", LONG, 1.1)["group"]
    submit(found, "short", SHORT, 1.1)
    for iteration in range(3):
        for phase, length_s in (("rollout", 100.0), ("train", 300.0)):
            answers = found.request("short", phase, iteration)
            while not (grants := [each for each in answers if isinstance(each, Granted)]):
                answers = found.wait(25.0)
            found.now += length_s
            released = {"job": "short", "attempt": 1, "phase": phase, "epoch": grants[0].epoch}
            found.call(Release, client="short", **released)
        found.call(Completed, job="short", attempt=1, iteration=iteration, client="short")
    job = found.job("short")
    assert job["group"] != group and "train takes 300 s, its file says 25: goes from" in job["note"]
    assert order_in(found, group) == ["long"]


def test_all_iterations_in_turns_are_as_long_as_promised() -> None:
    found = scheduler("lifetime-multirate", lease_s=1e6)
    submit(found, "long", LONG, 1.1)
    submit(found, "short", SHORT, 1.1)
    times_s = {("long", "rollout"): 400.0, ("long", "train"): 100.0}
    times_s |= {("short", "rollout"): 100.0, ("short", "train"): 25.0}
    starts_s: dict[str, list[float]] = {"long": [], "short": []}
    ends: list[tuple[float, Granted]] = []

    def note(answers: list[Any]) -> None:
        for grant in (each for each in answers if isinstance(each, Granted)):
            ends.append((found.now + times_s[grant.job, grant.phase], grant))
            if grant.phase == "rollout":
                starts_s[grant.job].append(found.now)

    for job in starts_s:
        note(found.request(job))
    while found.now < 6000:
        wake_s = found.control.next_wake_s(found.now)
        found.now = min([each[0] for each in ends] + ([wake_s] if wake_s is not None else []))
        found.control.tick(found.now)
        note(found._commit())
        for end in [each for each in ends if each[0] <= found.now]:
            ends.remove(end)
            job, phase, iteration = end[1].job, end[1].phase, end[1].iteration
            released = {"job": job, "attempt": 1, "phase": phase, "epoch": end[1].epoch}
            note(found.call(Release, client=job, **released))
            is_train = phase == "train"
            note(found.request(job, "rollout" if is_train else "train", iteration + is_train))
    for job, limit_s in (("long", 550.0), ("short", 137.5)):
        lengths_s = [after - before for before, after in zip(starts_s[job], starts_s[job][1:], strict=False)]
        assert len(lengths_s) >= 9 and max(lengths_s) <= limit_s + 0.01


def test_a_job_takes_the_next_best_group_where_the_best_has_no_certificate() -> None:
    found = scheduler("weave")
    first = submit(found, "a", (100.0, 100.0), 2.0)["group"]
    second = submit(found, "b", (200.0, 350.0), 1.3)["group"]
    assert first != second
    assert submit(found, "c", (200.0, 150.0), 9.0, dry_run=True)["group"] == first
    found.now += 15_000  # in its first iteration: what a has left of its SLO is less than 350 s an iteration
    assert submit(found, "c", (200.0, 150.0), 9.0)["group"] == second, "and no nodes are bought for it"
