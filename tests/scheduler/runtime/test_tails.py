"""Tails of running jobs: told to move where that pays, and the nodes that they leave go on."""

import sys
from pathlib import Path
from typing import Any

import pytest
from lone_scheduler import Scheduler, error_of, only
from served_cluster import JOB, ServedCluster

from rose.scheduler.runtime.channel.messages import Answer, Granted, Hello, Moved, Release, Report, Start

TAIL = {"step_s": 0.01, "request_s": 0.001, "prompt_tokens": 10, "prefill_tokens_per_s": 1e5, "pause_s": 0.01}
LENGTHS = [50] * 18 + [1000] * 2


def phases(rollout_s: float, nodes: int, train_s: float = 0.1) -> dict[str, Any]:
    return {"rollout": {"seconds": rollout_s, "nodes": nodes}, "train": {"seconds": train_s}}


def two_nodes(train_s: float = 0.1, num_ranks: int = 1) -> Scheduler:
    """`a` on both, with a tail of a tenth of its responses; `b` on one of them."""
    scheduler = Scheduler(groups={"main": {"num_rollout_nodes": 2}})
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    rows = {"a": (phases(25.0, 2, train_s), [0, 1], TAIL), "b": (phases(5.0, 1, train_s), [1], None)}
    for name, (phase_rows, nodes, tail) in rows.items():
        fields = {"phases": phase_rows, "rollout_nodes": nodes, "tail": tail, "max_tokens": 1000}
        fields["num_ranks"] = num_ranks if name == "a" else 1
        only(Start, scheduler.submit(name, iterations=9, **fields))
    return scheduler


def report(scheduler: Scheduler, num_done: int, **more: Any) -> list[int] | None:
    [reply] = scheduler.call(
        Report, job="a", attempt=1, phase="rollout", num_done=num_done, num_total=20, client="a", **more
    )
    assert isinstance(reply, Answer) and reply.error is None
    keep: list[int] | None = reply.body.get("keep")
    return keep


def rollout_with_known_lengths(scheduler: Scheduler) -> Granted:
    """a's second rollout; b waits for its node."""
    first = only(Granted, scheduler.request("a"))
    assert report(scheduler, 18, num_tokens=50) is None, "nothing is known of its lengths"
    assert report(scheduler, 20, lengths=LENGTHS) is None
    scheduler.call(Release, job="a", attempt=1, phase="rollout", epoch=first.epoch, client="a")
    train = only(Granted, scheduler.request("a", "train"))
    scheduler.call(Release, job="a", attempt=1, phase="train", epoch=train.epoch, client="a")
    held = only(Granted, scheduler.request("a", iteration=1))
    assert scheduler.request("b") == []
    return held  # type: ignore[no-any-return]


def test_a_tail_moves_where_the_past_says_so_and_what_it_leaves_goes_on() -> None:
    scheduler = two_nodes()
    held = rollout_with_known_lengths(scheduler)
    scheduler.now += 0.5
    assert report(scheduler, 2, num_tokens=50) is None, "most of it is still to come"
    assert report(scheduler, 18) is None, "it does not say how far they are"
    assert report(scheduler, 18, num_tokens=50) == [0], "b is on the other one"
    scheduler.restart(scheduler.now)
    assert report(scheduler, 18, num_tokens=50) == [0], "asked again, and of another scheduler"
    answers = scheduler.call(Moved, job="a", attempt=1, epoch=held.epoch, keep=[0], client="a")
    granted = only(Granted, answers)
    assert granted.job == "b" and granted.epoch > held.epoch
    assert report(scheduler, 19, num_tokens=60) is None, "it has moved"
    again = scheduler.call(Moved, job="a", attempt=1, epoch=held.epoch, keep=[0], client="a")
    assert only(Answer, again).error is None
    scheduler.restart(scheduler.now)
    scheduler.call(Release, job="b", attempt=1, phase="rollout", epoch=granted.epoch, client="b")
    assert scheduler.request("b", "train") == [], "a trains first"
    scheduler.call(Release, job="a", attempt=1, phase="rollout", epoch=held.epoch, client="a")
    assert only(Granted, scheduler.request("a", "train")).job == "a"


def test_a_tail_that_could_end_too_late_or_gains_nothing_stays() -> None:
    scheduler = two_nodes()
    rollout_with_known_lengths(scheduler)
    scheduler.now += 15.0
    assert report(scheduler, 18, num_tokens=50) is None, "11.4 s of decoding are possible, 10 s are left"
    balanced = two_nodes(train_s=300.0)
    rollout_with_known_lengths(balanced)
    assert report(balanced, 18, num_tokens=50) is None, "training is what all wait for"


def test_a_tail_stays_where_nobody_could_use_its_nodes() -> None:
    scheduler = two_nodes()
    held = rollout_with_known_lengths(scheduler)
    scheduler.control._state.permits_of("b").drop("b", scheduler.now)  # it crashed
    assert report(scheduler, 18, num_tokens=50) is None
    for keep, words in (([7], r"can't keep \[7\]"), ([], r"can't keep \[\]")):
        error = error_of(scheduler.call(Moved, job="a", attempt=1, epoch=held.epoch, keep=keep, client="a"))
        assert words.replace("\\", "") in error
    stale = scheduler.call(Moved, job="a", attempt=1, epoch=held.epoch - 1, keep=[0], client="a")
    assert "holds no permit of epoch" in error_of(stale)


def test_a_tail_moves_as_soon_as_somebody_can_use_its_nodes() -> None:
    scheduler = two_nodes()
    rollout_with_known_lengths(scheduler)
    scheduler.control._state.permits_of("b").drop("b", scheduler.now)  # it crashed
    assert report(scheduler, 18, num_tokens=50) is None
    assert scheduler.request("b") == [], "it is back"
    assert report(scheduler, 18, num_tokens=50) == [0]


def test_rank_0_moves_the_tail_of_a_job_and_all_ranks_release_what_it_keeps() -> None:
    scheduler = two_nodes(num_ranks=2)

    def ask(phase: str, iteration: int = 0) -> list[Granted]:
        answers = [scheduler.request("a", phase, iteration, rank=rank) for rank in (1, 0)][-1]
        return [each for each in answers if isinstance(each, Granted)]

    def release(phase: str, epoch: int, rank: int) -> list[Granted]:
        answers = scheduler.call(Release, job="a", attempt=1, phase=phase, epoch=epoch, rank=rank)
        return [each for each in answers if isinstance(each, Granted)]

    held = ask("rollout")[0]
    report(scheduler, 20, lengths=LENGTHS)
    for rank in (0, 1):
        release("rollout", held.epoch, rank)
    epoch = ask("train")[0].epoch
    for rank in (0, 1):
        release("train", epoch, rank)
    held = ask("rollout", 1)[0]
    assert scheduler.request("b") == []
    assert report(scheduler, 18, num_tokens=50) == [0]
    answers = scheduler.call(Moved, job="a", attempt=1, epoch=held.epoch, keep=[0], client="a")
    guest = only(Granted, answers)
    assert guest.job == "b"
    scheduler.call(Release, job="b", attempt=1, phase="rollout", epoch=guest.epoch, client="b")
    assert scheduler.request("b", "train") == []
    assert release("rollout", held.epoch, 0) == [], "rank 1 is still there"
    assert scheduler.job("a")["ranks_holding"] == [1]
    assert release("rollout", held.epoch, 1) == []
    assert {each.job for each in ask("train", 1)} == {"a"}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_job_runs_on_the_node_that_a_real_tail_has_left(tmp_path: Path, num_ranks: int) -> None:
    with ServedCluster(tmp_path, groups={"main": {"num_rollout_nodes": 2}}) as cluster:
        command = [sys.executable, str(Path(__file__).with_name("tail_job.py")), str(tmp_path)]
        tail = {"command": command, "tail": TAIL, "rollout_nodes": [0, 1], "max_tokens": 1000}
        tail |= {"num_ranks": num_ranks, "launch": "per-rank" if num_ranks > 1 else "once"}
        # Worst cases of an hour: however slow this machine is, there is time left to move.
        assert cluster.submit("tail", rollout_s=3600.0, **tail).error is None
        command = [sys.executable, str(JOB), str(tmp_path), "0.05", "0.05"]
        other = {"command": command, "rollout_nodes": [1], "slo": 1e4, "iterations": 10_000}
        assert cluster.submit("other", rollout_s=30.0, **other).error is None
        assert cluster.wait_state("tail", "done")["iterations"] == [3, 3]
        rollouts = [each for each in cluster.phases("tail") if each["phase"] == "rollout"]
        assert [each["moves"] for each in rollouts] == [[], [[0]], [[0]]]
        others = [each for each in cluster.phases("other") if each["phase"] == "rollout"]
        for each in rollouts[1:]:
            assert any(each["begin_s"] < one["begin_s"] < each["end_s"] for one in others)
        first = rollouts[0]
        assert not any(first["begin_s"] < one["begin_s"] < first["end_s"] for one in others)
