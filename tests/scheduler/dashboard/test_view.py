"""What the dashboard makes of a scheduler's facts, with a clock of the test's own."""

import itertools
from typing import Any

import pytest

from rose.scheduler.dashboard.metrics import prometheus_text
from rose.scheduler.dashboard.view import state_view
from rose.scheduler.runtime.channel.messages import (
    Answer,
    AnyCall,
    Cancel,
    Completed,
    Drain,
    Exited,
    Granted,
    Hello,
    Overview,
    Release,
    Request,
    Submit,
    decode_call,
    decode_scheduler_message,
    encode,
)
from rose.scheduler.runtime.decide.cluster_scheduler import ClusterScheduler
from rose.scheduler.runtime.decide.state import NUM_ENDED
from rose.scheduler.runtime.job.spec import ServeSpec


class Watched:
    """A control, and what the dashboard sees of it."""

    def __init__(self, **cluster: Any) -> None:
        self.now = 1000.0
        self.seq = 0
        spec = {"groups": {"main": {"num_rollout_nodes": 2}}, **cluster}
        self.control = ClusterScheduler(ServeSpec.model_validate(spec), {}, self.now, 7, "clock 1")
        self.call(Hello, running={}, log_folder="/logs")

    def call(self, kind: type[AnyCall], **fields: Any) -> list[Any]:
        self.seq += 1
        call = decode_call(encode(kind(seq=self.seq, **fields)))
        self.control.handle("client", call, self.now)
        return [decode_scheduler_message(each.body) for each in self.control.take_batch().outgoing]

    def submit(self, name: str, **fields: Any) -> None:
        phases = {
            "rollout": {"seconds": fields.pop("rollout_s", 60.0), "nodes": 1},
            "train": {"seconds": fields.pop("train_s", 40.0)},
        }
        base = {
            "name": name,
            "command": ["x"],
            "phases": phases,
            "slo": 2.0,
            "max_tokens": 1,
            "iterations": 9,
        }
        replies = self.call(Submit, spec={**base, "group": "main", **fields})
        assert [each.error for each in replies if isinstance(each, Answer)] == [None]

    def iterate(self, job: str, iteration: int, rollout_s: float, train_s: float) -> None:
        """One whole iteration with nobody beside it."""
        for phase, seconds in (("rollout", rollout_s), ("train", train_s)):
            fields = {"job": job, "attempt": 1, "phase": phase}
            [grant] = [
                each
                for each in self.call(Request, iteration=iteration, **fields)
                if isinstance(each, Granted) and each.job == job
            ]
            self.now += seconds
            self.call(Release, epoch=grant.epoch, **fields)
        self.call(Completed, job=job, attempt=1, iteration=iteration)

    def view(self) -> dict[str, Any]:
        [reply] = self.call(Overview)
        view: dict[str, Any] = state_view(reply.body, [])
        return view

    def job(self, name: str) -> dict[str, Any]:
        return next(each for each in self.view()["jobs"] if each["name"] == name)


def test_an_empty_cluster_costs_nothing_and_divides_by_nothing() -> None:
    view = Watched().view()
    assert view["cost"] == {"dollars_per_hour": 0, "solo_dollars_per_hour": 0, "saved_share": None}
    assert view["pools"]["rollout"]["num_empty"] == 2 and view["pools"]["rollout"]["idle_share"] is None
    assert [group["cycle_s"] for group in view["groups"]] == [0.0]
    assert b"rose_sched_up 1.0" in prometheus_text(view)


def test_a_group_shows_its_certified_cycle_and_its_bubbles() -> None:
    cluster = Watched()
    cluster.submit("a", rollout_nodes=[0])
    cluster.submit("b", rollout_nodes=[1])
    [group] = cluster.view()["groups"]
    assert group["cycle_s"] == pytest.approx(100.0)
    lengths = {
        node["name"]: sorted((bar["job"], round(bar["length_s"])) for bar in node["bars"])
        for node in group["nodes"]
    }
    assert lengths == {"rollout-0": [("a", 60)], "rollout-1": [("b", 60)], "train": [("a", 40), ("b", 40)]}
    assert group["idle_share"] == {"rollout": pytest.approx(0.4), "train": pytest.approx(0.2)}
    for node in group["nodes"]:
        spans = [(bar["start_s"], bar["start_s"] + bar["length_s"]) for bar in node["bars"]]
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_phase_that_wraps_around_the_cycle_is_two_bars() -> None:
    cluster = Watched()
    for name in ("a", "b"):
        cluster.submit(name, rollout_nodes=[0])
    [group] = cluster.view()["groups"]
    assert group["cycle_s"] == pytest.approx(120.0)
    for node in group["nodes"]:
        for bar in node["bars"]:
            assert bar["start_s"] >= 0 and bar["start_s"] + bar["length_s"] <= 120.0 + 1e-6
    train = next(node for node in group["nodes"] if node["name"] == "train")
    assert sum(bar["length_s"] for bar in train["bars"]) == pytest.approx(80.0)
    assert [job["slo"]["certified"] for job in cluster.view()["jobs"]] == [pytest.approx(1.2)] * 2


def test_cost_is_of_groups_with_jobs_against_nodes_for_every_job() -> None:
    cluster = Watched()
    cluster.submit("a", rollout_nodes=[0])
    cluster.submit("b", rollout_nodes=[1])
    view = cluster.view()
    assert view["cost"]["dollars_per_hour"] == pytest.approx(2 * 8 * 1.85 + 8 * 5.28)
    assert view["cost"]["solo_dollars_per_hour"] == pytest.approx(2 * (8 * 1.85 + 8 * 5.28))
    assert view["pools"]["train"]["num_used"] == 1


def test_a_group_that_a_job_is_about_to_join_costs_nothing_yet() -> None:
    cluster = Watched(policy="lifetime", groups={})
    cluster.submit("a", group=None)
    [reply] = cluster.call(Overview)
    body = dict(reply.body)
    body["groups"]["group-2"] = {**body["groups"]["group-1"], "jobs": {"a": [0]}, "order": ["a"]}
    view = state_view(body, [])
    used = {kind: (pool["num_used"], pool["num_empty"]) for kind, pool in view["pools"].items()}
    assert used == {"rollout": (1, 1), "train": (1, 1)}
    assert view["cost"]["dollars_per_hour"] == pytest.approx(8 * 1.85 + 8 * 5.28)
    assert view["cost"]["saved_share"] == pytest.approx(0.0)


def test_slowdown_is_observed_between_completed_iterations() -> None:
    cluster = Watched()
    cluster.submit("a")
    assert cluster.job("a")["slo"]["is_met"] is None
    cluster.iterate("a", 0, 60.0, 40.0)
    assert cluster.job("a")["slo"]["num_observed"] == 0, "the first one has no beginning"
    cluster.iterate("a", 1, 60.0, 60.0)
    cluster.iterate("a", 2, 30.0, 50.0)
    slo = cluster.job("a")["slo"]
    assert (slo["observed_mean"], slo["observed_worst"]) == (pytest.approx(1.0), pytest.approx(1.2))
    assert (slo["target"], slo["certified"], slo["is_met"]) == (2.0, pytest.approx(1.0), True)
    cluster.call(Completed, job="a", attempt=1, iteration=2)
    assert cluster.job("a")["slo"]["num_observed"] == 2, "said twice, counted once"


@pytest.mark.parametrize(("kind", "is_met"), [("iteration", False), ("lifetime", True)])
def test_one_slow_iteration_misses_an_iteration_slo_alone(kind: str, is_met: bool) -> None:
    cluster = Watched()
    cluster.submit("a", slo_kind=kind)
    for iteration, train_s in enumerate((40.0, 200.0, 40.0, 40.0)):
        cluster.iterate("a", iteration, 60.0, train_s)
    assert cluster.job("a")["slo"]["is_met"] is is_met


def test_who_holds_and_who_waits_is_told_with_its_time() -> None:
    cluster = Watched()
    for name in ("a", "b"):
        cluster.submit(name, rollout_nodes=[0])
        cluster.call(Request, job=name, attempt=1, phase="rollout", iteration=0)
    cluster.now += 5.0
    assert (cluster.job("a")["holds"], cluster.job("a")["held_s"]) == ("rollout", 5.0)
    waiting = cluster.job("b")
    assert (waiting["waits_for"], waiting["behind"], waiting["waited_s"]) == ("rollout", ["a"], 5.0)
    nodes = {node["name"]: node["holder"] for node in cluster.view()["groups"][0]["nodes"]}
    assert nodes == {"rollout-0": "a", "rollout-1": None, "train": None}
    cluster.call(Exited, job="a", attempt=1, exit_status=1)
    assert cluster.job("a")["restarts"] == 1
    assert cluster.job("b")["holds"] == "rollout"


def test_drained_nodes_are_counted_in_their_pool() -> None:
    cluster = Watched(groups={"main": {"num_rollout_nodes": 2, "num_train_nodes": 3}})
    cluster.call(Drain, group="main", node="rollout-1")
    cluster.call(Drain, group="main", node="train")
    pools = cluster.view()["pools"]
    assert (pools["rollout"]["num_drained"], pools["train"]["num_drained"]) == (1, 3)


def test_only_the_latest_ended_jobs_are_shown_and_all_are_counted() -> None:
    cluster = Watched()
    for number in range(NUM_ENDED + 3):
        cluster.submit(f"job-{number}")
        cluster.call(Cancel, job=f"job-{number}")
        cluster.call(Exited, job=f"job-{number}", attempt=1, exit_status=0)
    cluster.submit("running")
    view = cluster.view()
    assert view["states"] == {"cancelled": NUM_ENDED + 3, "running": 1}
    assert len(view["jobs"]) == NUM_ENDED + 1 and view["jobs"][0]["name"] == "job-3"


def test_a_name_that_is_used_again_begins_its_counts_anew() -> None:
    cluster = Watched()
    cluster.submit("a")
    for iteration in range(2):
        cluster.iterate("a", iteration, 60.0, 40.0)
    cluster.call(Cancel, job="a")
    cluster.call(Exited, job="a", attempt=1, exit_status=0)
    assert cluster.job("a")["slo"]["num_observed"] == 1
    cluster.submit("a")
    assert cluster.job("a")["slo"]["num_observed"] == 0
