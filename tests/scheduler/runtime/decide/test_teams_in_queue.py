"""Teams that share a cluster: whose job comes first, and what keeps one from starting."""

from typing import Any

import pytest
from full_cluster import Full, pool
from lone_scheduler import error_of

from rose.scheduler.runtime.channel.messages import Drain, HoldJob
from rose.scheduler.runtime.decide.records import MAX_OVERTAKEN
from rose.scheduler.runtime.job.spec import ServeSpec

TEAMS = {"vision": {"share": 3.0}, "math": {"max_rollout_nodes": 1}}


def test_the_team_that_uses_least_for_its_share_comes_first() -> None:
    full = Full(2, teams={"vision": {"share": 3.0}, "math": {}})
    for name, team in (("v1", "vision"), ("m1", "math"), ("m2", "math"), ("v2", "vision"), ("v3", "vision")):
        full.submit(name, team=team)
    assert full.scheduler.job("v2")["ahead"] == 0, "vision uses as much as math, for three times the share"
    assert full.end("v1") == ["v2"]
    assert full.end("m1") == ["m2"], "math uses nothing now"
    full.submit("p", team="math", priority=1)
    assert full.end("m2") == ["p"], "the priority comes before shares"


@pytest.mark.parametrize("team", [None, "gone"])
def test_jobs_without_a_team_are_one_team_of_share_1(team: str | None) -> None:
    full = Full(3, teams={"vision": {}, "gone": {}})
    for name, of_team in (("n1", team), ("n2", team), ("v1", "vision"), ("v2", "vision"), ("n3", team)):
        full.submit(name, team=of_team)
    content = {**full.scheduler.cluster.model_dump(), "teams": {"vision": {}}}
    full.scheduler.cluster = ServeSpec.model_validate(content)
    full.scheduler.restart(full.scheduler.now)
    assert full.end("n2") == ["v2"], "both use one node, and v2 was submitted first"
    assert full.end("v1") == ["n3"]


@pytest.mark.parametrize("light", ["light", None])
def test_jobs_of_a_team_that_uses_less_overtake_a_large_one_only_so_often(light: str | None) -> None:
    full = Full(4, teams={"heavy": {}, "light": {}})
    for name, num_nodes in (("h1", 1), ("h2", 2), ("big", 2), ("last", 2)):
        full.submit(name, num_nodes, team="heavy")
    for number in range(MAX_OVERTAKEN):
        assert full.submit(f"l{number}", team=light)["state"] == "running"
        assert full.end(f"l{number}") == []
    overtaken = [full.scheduler.job(name)["num_overtaken"] for name in ("big", "last")]
    assert overtaken == [MAX_OVERTAKEN, 0], "only the first job of a team: else shares would soon not count"
    late = full.submit("late", team=light)
    assert late["state"] == "queued" and "behind big" in late["why"] and late["ahead"] == 1
    full.scheduler.restart(full.scheduler.now)
    assert full.end("h2") == ["big", "late"], "big is first, though its team uses more"


def test_a_job_that_can_not_run_hides_none_of_its_team_from_the_bound() -> None:
    pools = {"rollout": pool("h20", 4), "train": pool("h800", 4), "max_residents": 1}
    full = Full(groups={"main": {}}, pools=pools, teams={"heavy": {}, "light": {}})
    full.submit("h1", group="main", team="heavy")
    full.submit("h2", 2, team="heavy")
    full.submit("stuck", group="main", team="heavy")
    for number in range(2 * MAX_OVERTAKEN):
        if number == MAX_OVERTAKEN:
            full.scheduler.call(Drain, group="main", node="train")
            full.submit("big", 2, team="heavy")
        assert full.submit(f"l{number}", team="light")["state"] == "running"
        assert full.end(f"l{number}") == []
    assert "behind big" in full.submit("late", team="light")["why"]
    assert full.end("h2") == ["big", "late"]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_job_waits_for_its_teams_quota_and_keeps_nobody_waiting(is_restarted: bool) -> None:
    full = Full(4, teams=TEAMS)
    full.submit("m1", team="math")
    waits = full.submit("m2", team="math")
    assert waits["state"] == "queued" and "team math uses 1 of its 1 rollout nodes" in waits["why"]
    if is_restarted:
        full.scheduler.restart(full.scheduler.now)
    for number in range(MAX_OVERTAKEN + 2):
        assert full.submit(f"v{number}", team="vision")["state"] == "running"
        assert full.end(f"v{number}") == []
    assert full.end("m1") == ["m2"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"team": "maths"}, "no team 'maths'; the cluster's file has vision, math"),
        ({"team": "math", "num_nodes": 2}, "rollout needs 2 nodes, but team math may use 1"),
    ],
)
def test_a_job_of_no_known_team_or_beyond_its_quota_is_refused(fields: dict[str, Any], words: str) -> None:
    full = Full(4, teams=TEAMS)
    phases = {kind: {"seconds": 1.0, "nodes": fields.pop("num_nodes", 1)} for kind in ("rollout",)}
    phases["train"] = {"seconds": 1.0, "nodes": 1}
    assert words in error_of(full.scheduler.submit("x", group=None, phases=phases, **fields))


def test_a_queued_job_is_told_when_it_could_start_and_whose_end_lets_it() -> None:
    full = Full(2)
    full.submit("short", iterations=10)
    full.submit("long", iterations=100)
    full.submit("small")
    full.submit("large", num_nodes=2)
    assert full.scheduler.job("small")["earliest"] == {"in_s": 20.0, "after": "short"}
    assert full.scheduler.job("large")["earliest"] == {"in_s": 200.0, "after": "long"}
    full.scheduler.control._state.groups.check_integrity(full.scheduler.now)
    full.scheduler.call(HoldJob, job="small", client="cli")
    assert full.scheduler.job("small")["earliest"] is None, "it waits for its release"
    assert "earliest" not in full.scheduler.job("long")


def test_the_earliest_start_of_a_job_over_its_quota_is_the_end_of_one_of_its_team() -> None:
    full = Full(3, teams=TEAMS)
    full.submit("other", iterations=10)
    full.submit("m1", team="math", iterations=100)
    assert full.submit("m2", team="math")["state"] == "queued", "though there are free nodes"
    assert full.scheduler.job("m2")["earliest"] == {"in_s": 200.0, "after": "m1"}
