"""The placement groups of the scheduler's groups: which bundle of which Ray node is which node of a group.

A group's nodes are placed together when a job needs them first, and given back when no job of the group is
left. Ray moves a bundle whose node has died. Nodes that a job needs in addition are placed on their own. So
is each node that it may hand back, which is given back when no job of the group uses it. The nodes stay
when the scheduler ends, and the names of their placement groups say to the next one what they are. All
threads may call.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rose.jobs.on_ray.actors import Keeper, Where
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.job.job import JobNode
from rose.scheduler.runtime.job.spec import PlacementStrategy, RayClusterSpec

logger = logging.getLogger(__name__)

POLL_S = 0.1
FRESH_S = 10.0
"""What a keeper has said longer ago, because others took long, is asked for again."""
KEEPER_S = 300.0
"""A keeper that has not answered for this long has hung, and another one takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where Ray has placed one node of a group."""

    node: str
    ray_node: str
    strategy: PlacementGroupSchedulingStrategy
    """Ray's scheduling strategy for actors beside the keeper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One node of a group, as its keeper describes it."""

    node: JobNode
    ray_node: str


@dataclass(slots=True, kw_only=True)
class _Placed:
    """Nodes of a group that were placed together."""

    nodes: tuple[str, ...]
    name: str
    pg: PlacementGroup
    keepers: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, tuple[Any, float]] = field(default_factory=dict)
    """Questions to keepers that have no answer yet, and when they were asked."""
    said: dict[str, tuple[Where, float]] = field(default_factory=dict)
    """Answers of keepers, and when they came. They wait here for those of the other nodes."""
    ray_nodes: dict[str, str] = field(default_factory=dict)
    """The Ray node of each node, as far as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the scheduler is told of the groups' nodes."""

    leaving: list[str]
    """The jobs of groups with nodes that are about to go away."""
    num_idle: dict[Phase, int]
    """Placed nodes that no job of their group uses, by pool."""


class GroupNodes:
    """All groups' nodes on one Ray cluster."""

    def __init__(self, spec: RayClusterSpec, root: str, lifetime: str | None = "detached") -> None:
        """root: begins the names of this scheduler's placement groups. lifetime: as Ray takes it; None has
        them end with this process."""
        self._spec = spec
        self._root = root
        self.lifetime = lifetime
        self._lock = threading.RLock()
        self._groups: dict[str, list[_Placed]] = {}
        self._users: dict[str, tuple[str, tuple[str, ...]]] = {}
        """For each job, its group and its nodes there."""
        self._condemned: set[str] = set()
        """Groups that have nodes which are about to go away."""
        self._view = View(leaving=[], num_idle=dict.fromkeys(Phase, 0))

    def seat(
        self,
        job: str,
        group: str,
        nodes: tuple[str, ...],
        placement: PlacementStrategy,
        is_wanted: Callable[[], bool],
        found: Callable[[Sequence[Spot]], None],
        spare: Collection[str] = (),
    ) -> list[Seat] | None:
        """Waits until Ray has placed these nodes. Returns them in this order, or None once not wanted.

        found: is told once where they are, while their keepers start. spare: those of the nodes that the job
        may hand back.
        """
        is_found = False
        while is_wanted():
            with self._lock:
                if self._users.get(job, (group,))[0] != group:
                    self.leave(job)
                if group in self._condemned:
                    self._users.pop(job, None)  # no process of it runs
                    if not self._has_jobs(group):
                        self._remove(group)
                seats, spots = None, None
                if group not in self._condemned:
                    self._users[job] = (group, nodes)
                    self._give_back_unused(group)
                    spots = self._spots(group, nodes, placement, spare)
                    seats = self._seats(spots) if spots is not None else None
            if spots is not None and not is_found:
                found([spot for _, spot in spots])
                is_found = True
            if seats is not None:
                return seats
            time.sleep(POLL_S)
        return None

    def adopt(self, users: Sequence[tuple[str, str, Mapping[str, str]]]) -> None:
        """Takes over what an earlier scheduler has placed.

        users: each job of which anything may still run, its group, and the Ray node of each of its nodes
        there. Gives back the nodes of groups that none of these jobs is in.
        """
        with self._lock:
            known = ray.util.list_named_actors()
            for table in ray.util.placement_group_table().values():
                root, *fields = table["name"].split("/")
                if root != self._root or table["state"] == "REMOVED":
                    continue
                nodes = tuple(fields[-2].split("+"))
                try:
                    pg = ray.util.get_placement_group(table["name"])
                except ValueError:  # it has gone since it was listed
                    continue
                placed = _Placed(nodes=nodes, name=table["name"], pg=pg)
                for name in known:
                    kind, _, node = name.removesuffix(name[-9:]).partition(f"/{table['name']}/")
                    if kind == "keeper":
                        with contextlib.suppress(ValueError):  # it has ended, and another one is made
                            placed.keepers[node] = ray.get_actor(name)
                self._groups.setdefault("/".join(fields[:-2]), []).append(placed)
            for job, group, ray_nodes in users:
                self._users[job] = (group, tuple(ray_nodes))
                for placed in self._groups.get(group, []):
                    placed.ray_nodes.update(
                        {node: ray_nodes[node] for node in placed.nodes if node in ray_nodes}
                    )
            for group in [each for each in self._groups if not self._has_jobs(each)]:
                self._remove(group)

    def vacate(self, job: str) -> None:
        """Notes that no process of the job is on its nodes; the group keeps them for the next attempt."""
        with self._lock:
            group = self._users[job][0] if job in self._users else None
            if group in self._condemned:
                self.leave(job)

    def leave(self, job: str) -> None:
        """Notes that the job has left its group, which gives its nodes back if no other job is in it."""
        with self._lock:
            if job not in self._users:
                return
            group, _ = self._users[job]
            if not any(each == group for other, (each, _) in self._users.items() if other != job):
                self._remove(group)  # may raise, and is called again then
            del self._users[job]

    def view(self, draining: Collection[str]) -> View:
        """Returns who has to leave, and what is idle; the last answer while Ray is slow to place nodes."""
        if self._lock.acquire(timeout=POLL_S):
            try:
                self._view = View(leaving=self._leaving(draining), num_idle=self._num_idle())
            finally:
                self._lock.release()
        return self._view

    def _leaving(self, draining: Collection[str]) -> list[str]:
        for group, placed in self._groups.items():
            if any(name in draining for each in placed for name in each.ray_nodes.values()):
                self._condemned.add(group)
        return [job for job, (group, _) in self._users.items() if group in self._condemned]

    def _num_idle(self) -> dict[Phase, int]:
        used = {(group, node) for group, nodes in self._users.values() for node in nodes}
        placed = [(group, node) for group, each in self._groups.items() for one in each for node in one.nodes]
        idle = [node for group, node in placed if (group, node) not in used]
        return {kind: sum(node.startswith(kind) for node in idle) for kind in Phase}

    def _has_jobs(self, group: str) -> bool:
        return any(each == group for each, _ in self._users.values())

    def _remove(self, group: str) -> None:
        for placed in self._groups.get(group, []):
            _free(placed)
        self._groups.pop(group, None)
        self._condemned.discard(group)

    def _give_back_unused(self, group: str) -> None:
        """Gives back the rollout nodes that were placed one by one and that no job of the group uses."""
        used = {node for each, nodes in self._users.values() if each == group for node in nodes}
        for placed in list(self._groups.get(group, [])):
            if len(placed.nodes) == 1 and placed.nodes[0] not in used:
                _free(placed)
                self._groups[group].remove(placed)

    def _spots(
        self,
        group: str,
        nodes: Sequence[str],
        placement: PlacementStrategy,
        spare: Collection[str] = (),
    ) -> list[tuple[_Placed, Spot]] | None:
        """Returns where the nodes are if Ray has placed all. Places those that were never asked for."""
        placed = self._groups.setdefault(group, [])
        known = {node for each in placed for node in each.nodes}
        missing = [node for node in nodes if node not in known]
        together = tuple(node for node in missing if node not in spare)
        for some in (together, *((node,) for node in missing if node in spare)):
            if some:
                placed.append(self._place(group, some, placement))
        spots = {}
        for each in placed:
            if not set(each.nodes) & set(nodes):
                continue
            table = ray.util.placement_group_table(each.pg)
            if table["state"] != "CREATED":
                return None
            for index, node in enumerate(each.nodes):
                spot = Spot(
                    node=node,
                    ray_node=table["bundles_to_node_id"][index],
                    strategy=PlacementGroupSchedulingStrategy(each.pg, placement_group_bundle_index=index),
                )
                spots[node] = each, spot
        return [spots[node] for node in nodes]

    def _place(self, group: str, nodes: tuple[str, ...], placement: PlacementStrategy) -> _Placed:
        bundles = [self._spec.bundle(node) for node in nodes]
        strategy = placement.value.upper().replace("-", "_")
        name = f"{self._root}/{group}/{'+'.join(nodes)}/{uuid.uuid4().hex[:8]}"
        made = placement_group(bundles, strategy=strategy, name=name, lifetime=self.lifetime)
        return _Placed(nodes=nodes, name=name, pg=made)

    def _seats(self, spots: Sequence[tuple[_Placed, Spot]]) -> list[Seat] | None:
        """Returns the nodes if their keepers answer."""
        found = [self._seat(placed, spot) for placed, spot in spots]
        seats = [each for each in found if each is not None]
        if len(seats) < len(found):
            return None
        for placed, _ in spots:
            placed.said.clear()
        return seats

    def _seat(self, placed: _Placed, spot: Spot) -> Seat | None:
        keeper = placed.keepers.get(spot.node)
        if keeper is None:
            bundle = dict(self._spec.bundle(spot.node))
            options = {
                "name": f"keeper/{placed.name}/{spot.node}/{uuid.uuid4().hex[:8]}",
                "lifetime": self.lifetime,
                "num_cpus": bundle.pop("CPU", 0),
                "num_gpus": bundle.pop("GPU", 0),
                "resources": bundle,
            }
            keeper = ray.remote(Keeper).options(**options, scheduling_strategy=spot.strategy).remote()
            placed.keepers[spot.node] = keeper
        where = self._where(placed, spot.node, keeper)
        if where is None:
            return None
        node = JobNode(name=spot.node, address=where.address, devices=where.devices)
        return Seat(node=node, ray_node=where.ray_node)

    def _where(self, placed: _Placed, node: str, keeper: Any) -> Where | None:
        """Returns what the node's keeper has said lately; None: it is asked."""
        now = time.monotonic()
        if node in placed.said and now - placed.said[node][1] <= FRESH_S:
            return placed.said[node][0]
        if node not in placed.asked:
            placed.asked[node] = keeper.where.remote(), now
        asked, since_s = placed.asked[node]
        if not ray.wait([asked], timeout=0)[0]:
            if now - since_s > KEEPER_S:
                logger.warning("no answer keeper=%s/%s", placed.name, node)
                ray.kill(keeper)
            return None
        del placed.asked[node]
        try:
            where: Where = ray.get(asked)
        except ray.exceptions.ActorUnavailableError:
            return None
        except ray.exceptions.RayError:  # it has ended with its Ray node, and Ray places the bundle again
            placed.keepers.pop(node, None)
            placed.ray_nodes.pop(node, None)
            return None
        placed.said[node], placed.ray_nodes[node] = (where, now), where.ray_node
        return where


def _free(placed: _Placed) -> None:
    for keeper in placed.keepers.values():
        ray.kill(keeper)
    remove_placement_group(placed.pg)
