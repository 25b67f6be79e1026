"""The nodes of groups on Ray, with keepers whose answers take as long as a test says. No Ray cluster runs."""

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
    monkeypatch.setattr(ray.util, "placement_group_table", lambda pg: {"state": "CREATED"})
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
        self._seat(placed, "rollout-0")

    def look(self) -> list[groups.Seat] | None:
        return self._seats("g", ("rollout-0", "train-0"), PlacementStrategy.PACK)


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
