"""Jobs that hand rollout nodes back while serving GPUs are lent to them, with a clock of the test's own."""

from collections.abc import Mapping
from typing import Any

import pytest
from lone_scheduler import HOUR_S, Scheduler, error_of, hello, only

from rose.scheduler.group.certificate import certify
from rose.scheduler.group.order import own_order
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Cancel,
    Completed,
    Exited,
    Granted,
    Hello,
    Release,
    SchedulerMessage,
    Start,
    Stop,
)
from rose.scheduler.runtime.lending.loans import RouterNews, Use

NUM_ASKED = 4
TRAIN_S = 0.1 * HOUR_S


class Sized:
    """A job that asks for four rollout nodes. Its rollouts take what they would with 32 GPUs lent to it."""

    def __init__(
        self,
        slo: float = 2.5,
        fewest: int = 1,
        num_nodes: int | None = None,
        team: str | None = None,
        job: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """job: more of its file."""
        self.team = team
        job = job if job is not None else {}
        self.num_ranks = job.get("num_ranks", 1)
        pools = {"serving_gpus": 32, "rollout": {"name": "h20", "dollars_per_gpu_hour": 1.85}}
        if num_nodes is not None:
            pools["rollout"] |= {"num_nodes": num_nodes}  # type: ignore[operator]
        self.scheduler = Scheduler(pools=pools, router={"url": "http://router:8100"}, groups={}, **more)
        if "ray" in more:
            hello(self.scheduler, 8)
        else:
            self.scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
        self.attempt, self.iteration, self.used_s = 1, 0, 0.0
        self.submit("a", slo=slo, borrow={"run_id": "run-a", "fewest_nodes": fewest}, **job)

    def submit(self, name: str, **fields: Any) -> list[SchedulerMessage]:
        phases = {"rollout": {"seconds": HOUR_S, "nodes": NUM_ASKED}, "train": {"seconds": TRAIN_S}}
        if self.team is not None:
            fields["team"] = self.team
        return self.scheduler.submit(name, **{"phases": phases, "group": None, "iterations": 1000, **fields})

    @property
    def num_nodes(self) -> int:
        return len(self.scheduler.job("a")["rollout_nodes"])

    def phase(self, phase: str, seconds: float) -> None:
        asked: list[SchedulerMessage] = []
        for rank in range(self.num_ranks):
            asked = self.scheduler.request("a", phase, self.iteration, attempt=self.attempt, rank=rank)
        grant = next((each for each in asked if isinstance(each, Granted)), None)
        while grant is None:
            later = self.scheduler.wait(60.0)
            grant = next((each for each in later if isinstance(each, Granted) and each.job == "a"), None)
        self.scheduler.now += seconds
        fields: dict[str, Any] = {"job": "a", "attempt": self.attempt, "phase": phase, "epoch": grant.epoch}
        for rank in range(self.num_ranks):
            assert only(Answer, self.scheduler.call(Release, **fields, rank=rank, client="a")).error is None

    def iterate(self, count: int = 1, lent: float = 32.0) -> list[SchedulerMessage]:
        """What everyone is told when the last one is safe."""
        told: list[SchedulerMessage] = []
        for _ in range(count):
            rollout_s = HOUR_S * 8 * NUM_ASKED / (8 * self.num_nodes + lent)
            self.phase("rollout", rollout_s)
            self.used_s += lent * rollout_s
            use = Use(job="a", submission=1, meter="m", gpu_s=self.used_s)
            self.scheduler.control.router_heard(RouterNews(used=(use,)))
            self.phase("train", TRAIN_S)
            call = {"job": "a", "attempt": self.attempt, "iteration": self.iteration}
            for rank in range(self.num_ranks):
                told = self.scheduler.call(Completed, **call, rank=rank, client=f"a-{rank}")
            self.iteration += 1
        return told

    def promised_s(self) -> float:
        """The longest iteration with own nodes alone, as anyone can compute it from the group."""
        [group] = [
            each
            for each in self.scheduler.control.groups.values()
            if "a" in [member.job.name for member in each.members]
        ]
        return certify(group, own_order(group)).bounds["a"].longest_s


def test_a_job_hands_nodes_back_while_it_borrows_and_its_certificate_holds_without_loans() -> None:
    sized = Sized()
    limit_s = 2.5 * (HOUR_S + TRAIN_S)
    sized.iterate(3)
    assert sized.num_nodes == NUM_ASKED, "the first iteration's beginning is not known"
    reply = only(Answer, sized.iterate(1))
    assert reply.body["rollout_nodes"] == [0, 1] and not reply.body["ends"]
    assert sized.promised_s() == pytest.approx(2 * HOUR_S + TRAIN_S)
    assert sized.promised_s() <= limit_s, "one node would take 4 h"
    job = sized.scheduler.job("a")
    assert job["asked_nodes"] == NUM_ASKED
    assert (
        job["note"]
        == "keeps 2 of the 4 rollout nodes that it asked for: with 32.0 lent GPUs that costs least"
    )
    assert job["serving_gpus"] == 32, "it borrows as many as the nodes that it asked for have"
    sized.scheduler.restart(5.0)
    assert sized.num_nodes == 2
    sized.iterate(5)
    assert (sized.num_nodes, sized.scheduler.job("a")["restarts"]) == (2, 0)


@pytest.mark.parametrize(
    ("slo", "fewest", "num_nodes"), [(1.1, 1, 4), (2.5, 1, 2), (10.0, 2, 2), (10.0, 1, 1)]
)
def test_it_keeps_as_many_nodes_as_its_slo_needs_and_as_its_file_says(
    slo: float, fewest: int, num_nodes: int
) -> None:
    sized = Sized(slo=slo, fewest=fewest)
    sized.iterate(4)
    assert sized.num_nodes == num_nodes


def test_a_job_without_loans_keeps_its_nodes_and_gets_them_back_when_loans_end() -> None:
    sized = Sized()
    sized.iterate(7, lent=0.0)
    assert sized.num_nodes == NUM_ASKED, "its turns use no lent GPU"
    sized.iterate(4)
    assert sized.num_nodes == 2
    # A job whose iterations are nearly all rollouts comes first, and takes all that is lent.
    phases = {"rollout": {"seconds": HOUR_S, "nodes": NUM_ASKED}, "train": {"seconds": 1.0}}
    sized.submit("b", phases=phases, borrow={"run_id": "run-b"}, slo=1.01)
    assert sized.scheduler.job("a")["serving_gpus"] == 0
    reply = only(Answer, sized.iterate(1, lent=0.0))
    assert len(reply.body["rollout_nodes"]) == NUM_ASKED
    assert sized.promised_s() == pytest.approx(HOUR_S + TRAIN_S)
    assert sized.scheduler.job("a")["note"].endswith("it is lent no serving GPUs any more")


def test_an_iteration_that_is_reported_again_changes_nothing() -> None:
    sized = Sized()
    sized.iterate(3)
    sized.scheduler.call(Completed, job="a", attempt=1, iteration=2, client="a")
    assert sized.num_nodes == NUM_ASKED, "the job has been told to go on with four"


def test_nodes_that_a_team_mate_has_taken_do_not_come_back_over_the_quota() -> None:
    sized = Sized(team="t", teams={"t": {"max_rollout_nodes": 4}})
    sized.iterate(4)
    assert sized.num_nodes == 2
    phases = {"rollout": {"seconds": HOUR_S, "nodes": 2}, "train": {"seconds": 1.0}}
    sized.submit("b", phases=phases, slo=1.01)
    assert sized.scheduler.job("b")["state"] == "running"
    phases["rollout"]["nodes"] = 4
    sized.team = None
    sized.submit("c", phases=phases, borrow={"run_id": "run-c"}, slo=1.01)
    assert sized.scheduler.job("a")["serving_gpus"] == 0
    sized.iterate(1, lent=0.0)
    assert sized.num_nodes == 2


def test_nodes_that_are_handed_back_go_to_a_queued_job_even_if_the_loans_end_then() -> None:
    sized = Sized(num_nodes=6, fewest=2)
    phases = {"rollout": {"seconds": HOUR_S, "nodes": 4}, "train": {"seconds": 1.0}}
    sized.submit("b", phases=phases, borrow={"run_id": "run-b"}, slo=1.01)
    assert sized.scheduler.job("b")["state"] == "queued"
    sized.iterate(4)
    assert (sized.num_nodes, sized.scheduler.job("b")["state"]) == (2, "running")
    assert sized.scheduler.job("a")["serving_gpus"] == 0
    sized.iterate(1, lent=0.0)
    assert sized.num_nodes == 2, "all other nodes are used, and its certificate holds with two"
    sized.scheduler.call(Cancel, job="b")
    sized.scheduler.call(Exited, job="b", attempt=1, exit_status=0, client="runner")
    assert sized.scheduler.job("a")["serving_gpus"] == 32


def test_a_job_that_holds_a_node_of_the_group_meanwhile_goes_on_and_its_node_is_kept() -> None:
    sized = Sized(slo=5.0)
    phases = {"rollout": {"seconds": 60.0, "nodes": 1}, "train": {"seconds": 60.0}}
    sized.submit("b", phases=phases, slo=500.0, iterations=1)
    scheduler = sized.scheduler
    assert scheduler.job("b")["group"] == scheduler.job("a")["group"]
    [shared] = scheduler.job("b")["rollout_nodes"]
    sized.iterate(3)
    sized.phase("rollout", 0.5 * HOUR_S)
    sized.used_s += 32 * 0.5 * HOUR_S
    scheduler.control.router_heard(
        RouterNews(used=(Use(job="a", submission=1, meter="m", gpu_s=sized.used_s),))
    )
    sized.phase("train", TRAIN_S)
    grant = only(Granted, scheduler.request("b"))
    reply = only(Answer, scheduler.call(Completed, job="a", attempt=1, iteration=3, client="a"))
    sized.iteration = 4
    assert 0 < len(reply.body["rollout_nodes"]) < NUM_ASKED and shared in reply.body["rollout_nodes"]
    scheduler.control._state.permits_of("a").check_integrity()
    assert not scheduler.request("a", iteration=4), "b has the node that both use"
    fields = {"job": "b", "attempt": 1, "phase": "rollout", "epoch": grant.epoch}
    assert only(Granted, scheduler.call(Release, **fields, client="b")).job == "a"


def test_on_ray_a_new_attempt_goes_on_with_the_nodes_that_are_left() -> None:
    sized = Sized(ray={})
    told = sized.iterate(4)
    assert only(Answer, told).body["ends"] and only(Stop, told).attempt == 1
    start = only(Start, sized.scheduler.call(Exited, job="a", attempt=1, exit_status=0, client="ray"))
    assert (start.rollout_nodes, start.first_iteration, start.attempt) == ([0, 1], 4, 2)
    assert start.spec["phases"]["rollout"]["nodes"] == 2
    assert sized.scheduler.job("a")["restarts"] == 0


@pytest.mark.parametrize(
    ("launch", "num_ranks", "num_left"), [("per-rank", 10, 6), ("per-node", 10, 6), ("once", 4, 4)]
)
def test_on_ray_each_node_keeps_its_ranks_when_a_job_of_several_hands_nodes_back(
    launch: str, num_ranks: int, num_left: int
) -> None:
    sized = Sized(ray={}, job={"num_ranks": num_ranks, "launch": launch})
    told = sized.iterate(4)
    answers = [each for each in told if isinstance(each, Answer)]
    assert len(answers) == num_ranks and all(each.body["ends"] for each in answers)
    assert sized.scheduler.job("a")["num_ranks"] == num_ranks, "the attempt that ends still has them"
    sized.scheduler.restart(5.0)
    again = {"job": "a", "attempt": 1, "iteration": 3, "rank": num_ranks - 1}
    assert only(Answer, sized.scheduler.call(Completed, **again, client="a")).body["ends"]
    start = only(Start, sized.scheduler.call(Exited, job="a", attempt=1, exit_status=0, client="ray"))
    assert (start.rollout_nodes, start.spec["num_ranks"]) == ([0, 1], num_left)
    sized.attempt, sized.num_ranks = 2, num_left
    sized.phase("rollout", HOUR_S)
    assert sized.scheduler.job("a")["num_ranks"] == num_left
    refused = sized.scheduler.request("a", "train", 4, attempt=2, rank=num_left)
    assert f"the attempt has {num_left} ranks" in error_of(refused)


def test_nodes_come_back_with_their_ranks_when_loans_end() -> None:
    sized = Sized(ray={}, job={"num_ranks": 5, "launch": "per-rank"})
    sized.iterate(4)
    sized.scheduler.call(Exited, job="a", attempt=1, exit_status=0, client="ray")
    sized.attempt, sized.num_ranks = 2, 3
    phases = {"rollout": {"seconds": HOUR_S, "nodes": NUM_ASKED}, "train": {"seconds": 1.0}}
    sized.submit("b", phases=phases, borrow={"run_id": "run-b"}, slo=1.01)
    assert sized.scheduler.job("a")["serving_gpus"] == 0
    assert only(Stop, sized.iterate(1, lent=0.0)).attempt == 2
    start = only(Start, sized.scheduler.call(Exited, job="a", attempt=2, exit_status=0, client="ray"))
    assert (len(start.rollout_nodes), start.spec["num_ranks"], start.first_iteration) == (4, 5, 5)


def test_a_job_whose_ranks_can_not_follow_its_nodes_is_refused() -> None:
    sized = Sized()
    borrow = {"run_id": "run-b", "fewest_nodes": 2}
    ranks = {"num_ranks": 10, "launch": "per-rank"}
    assert "the 10 ranks of launch per-rank would" in error_of(sized.submit("b", borrow=borrow, **ranks))
    ranks |= {"num_ranks": 7, "launch": "per-node"}
    assert "use a multiple of 5" in error_of(sized.submit("b", borrow=borrow, **ranks))
    named = {"run_id": "run-c", "fewest_nodes": 2}
    assert sized.submit("c", borrow=named, num_ranks=7, launch="once"), "torchrun's ranks stay where they are"


def test_a_job_of_a_named_group_keeps_its_nodes() -> None:
    sized = Sized()
    borrow = {"run_id": "run-b", "fewest_nodes": 2}
    assert "group is main" in error_of(sized.submit("b", borrow=borrow, group="main"))
    named = {**borrow, "asked_nodes": 9}
    assert "asked_nodes is set by the scheduler" in error_of(sized.submit("b", borrow=named))
    borrow["fewest_nodes"] = 5
    assert "asks for 4 rollout nodes; use at most 4" in error_of(sized.submit("b", borrow=borrow))
