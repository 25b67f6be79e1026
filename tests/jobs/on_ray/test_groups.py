"""The nodes of groups on Ray, with keepers whose answers take as long as a test says. No Ray cluster runs."""

from collections.abc import Sequence
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

from rose.jobs.on_ray import groups  # noqa: E402 - loads Ray
from rose.jobs.on_ray.actors import Where  # noqa: E402
from rose.scheduler.runtime.job.spec import PlacementStrategy, RayClusterSpec  # noqa: E402


class Keeper:
    """Each question to it is answered at the next look."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.where = self

    def remote(self) -> dict[str, Any]:
        return {"node": self.node, "looks": 0}


def wait(asked: list[dict[str, Any]], timeout: float) -> tuple[list[Any], list[Any]]:
    for each in asked:
        each["looks"] += 1
    return [each for each in asked if each["looks"] > 1], [each for each in asked if each["looks"] <= 1]


def test_nodes_are_found_also_if_their_keepers_answer_at_different_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda asked: Where(ray_node=asked["node"], address="h", devices=()))
    monkeypatch.setattr(ray.util, "placement_group_table", lambda pg: placed_on("rollout-0", "train-0"))
    nodes = GroupNodesOfTwo()
    looks = [nodes.look() for _ in range(6)]
    seats = next(each for each in looks if each is not None)
    assert [seat.ray_node for seat in seats] == ["rollout-0", "train-0"]


class GroupNodesOfTwo(groups.GroupNodes):
    """A group of two nodes, of which one keeper was asked a look before the other."""

    def __init__(self) -> None:
        super().__init__(RayClusterSpec(), "root")
        keepers = {node: Keeper(node) for node in ("rollout-0", "train-0")}
        placed = groups._Placed(nodes=tuple(keepers), name="root/g", pg=None, keepers=keepers)
        self._groups["g"] = [placed]
        [(_, spot)] = self._found("rollout-0")
        self._seat(placed, spot)

    def look(self) -> list[groups.Seat] | None:
        return self._seats(self._found("rollout-0", "train-0"))

    def _found(self, *nodes: str) -> list[tuple[groups._Placed, groups.Spot]]:
        found = self._spots("g", nodes, PlacementStrategy.PACK)
        assert found is not None
        return found


def placed_on(*ray_nodes: str) -> dict[str, Any]:
    """What Ray says of a placement group with a bundle on each of these Ray nodes."""
    return {"state": "CREATED", "bundles_to_node_id": dict(enumerate(ray_nodes))}


def test_parts_are_created_while_keepers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(ray, "wait", lambda asked, timeout: wait_noted(asked, timeout, events))
    monkeypatch.setattr(ray, "get", lambda asked: Where(ray_node=asked["node"], address="h", devices=()))
    monkeypatch.setattr(ray.util, "placement_group_table", lambda pg: placed_on("rollout-0", "train-0"))
    nodes = groups.GroupNodes(RayClusterSpec(), "root")
    keepers = {node: Keeper(node) for node in ("rollout-0", "train-0")}
    nodes._groups["g"] = [groups._Placed(nodes=tuple(keepers), name="root/g", pg=None, keepers=keepers)]

    def found(spots: Sequence[groups.Spot]) -> None:
        events.extend(f"{spot.node} is on {spot.ray_node}" for spot in spots)

    seats = nodes.seat("a", "g", tuple(keepers), PlacementStrategy.PACK, lambda: len(events) < 20, found)
    assert seats is not None and [seat.node.name for seat in seats] == ["rollout-0", "train-0"]
    first_answer = events.index("a keeper has answered")
    assert events[:first_answer] == ["rollout-0 is on rollout-0", "train-0 is on train-0"]


def wait_noted(asked: list[dict[str, Any]], timeout: float, events: list[str]) -> tuple[list[Any], list[Any]]:
    done = wait(asked, timeout)
    events.extend("a keeper has answered" for _ in done[0])
    return done


def test_nodes_that_end_while_they_are_taken_over_do_not_end_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"root/g/rollout-0+train-0/11111111", "root/h/rollout-0/22222222"}
    tables = {name: {"name": name, "state": "CREATED"} for name in names}
    keepers = [
        f"keeper/root/g/rollout-0+train-0/11111111/{node}/33333333" for node in ("rollout-0", "train-0")
    ]
    monkeypatch.setattr(ray.util, "placement_group_table", lambda: tables)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: keepers)
    monkeypatch.setattr(ray.util, "get_placement_group", lambda name: found(name, "root/g/"))
    monkeypatch.setattr(ray, "get_actor", lambda name: found(name, keepers[1]))
    nodes = groups.GroupNodes(RayClusterSpec(), "root")
    nodes.adopt([("a", "g", {name: name for name in ("rollout-0", "train-0")})])
    assert list(nodes._groups) == ["g"] and nodes._groups["g"][0].keepers == {"train-0": keepers[1]}


def found(name: str, known: str) -> str:
    """What Ray finds by a name, as it says it."""
    if not name.startswith(known):
        raise ValueError(f"Failed to look up {name}")
    return name
