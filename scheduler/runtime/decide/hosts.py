"""Maps the nodes of groups to hosts.

Owns the hosts, what they offer, when they were last heard, and the home (host) of each node of a group. A
host never has more nodes in use than it offers. A node keeps its home while the host lives. A group's nodes
get homes all at once, on one host if one has room. Pure: takes ``now``.

The runner beside the scheduler (`rose sched serve`) offers unlimited nodes and lives as long as the
scheduler. An agent (`rose sched agent`) offers its host's nodes, and counts as dead after a lease without a
heartbeat.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from rose.scheduler.group.model import Group, Phase


class Host(msgspec.Struct, kw_only=True):
    """One host, as its runner described it."""

    client: str
    log_folder: str
    num_nodes: dict[Phase, int] | None
    """Nodes by pool; None: unlimited, and no heartbeat is expected."""
    is_alive: bool = True


@dataclass(slots=True)
class Hosts:
    """All hosts of one cluster."""

    by_name: dict[str, Host] = field(default_factory=dict)
    homes: dict[str, dict[str, str]] = field(default_factory=dict)
    """For each group, the host of each node (rollout-0, train-0)."""
    heard_s: dict[str, float] = field(default_factory=dict)
    unsettled: set[str] = field(default_factory=set)
    """Groups of which some nodes in use have no home."""
    has_room: bool = False
    """Nodes have come free, or an unsettled group has got homes, since waiting jobs were last looked at."""
    _num_used: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Nodes with homes, by host and pool."""

    def silent(self, now: float, lease_s: float) -> list[str]:
        """Returns the living agents that have not been heard for a lease."""
        return [
            name
            for name, host in self.by_name.items()
            if host.is_alive
            and host.num_nodes is not None
            and now - self.heard_s.setdefault(name, now) > lease_s
        ]

    def is_beside(self, name: str | None) -> bool:
        """Whether the host is the scheduler's own machine: processes there end with their runner."""
        return name is not None and self.by_name[name].num_nodes is None

    def totals(self, *, with_dead: bool = False) -> dict[str, int | None]:
        """Returns the nodes of each pool that living hosts offer.

        None: they are unlimited, or no host is known yet.
        """
        alive = [host for host in self.by_name.values() if host.is_alive or with_dead]
        if not self.by_name or any(host.num_nodes is None for host in alive):
            return dict.fromkeys(Phase)
        return {
            kind: sum(host.num_nodes[kind] for host in alive if host.num_nodes is not None) for kind in Phase
        }

    def settle(self, name: str, group: Group | None) -> bool:
        """Finds homes for a group's nodes in use, where there is room. Returns whether anything changed.

        None: the group is gone, and its nodes are free.
        """
        before = self.homes.get(name, {})
        wanted = _nodes(group) if group is not None and group.members else []
        alive = {name for name, host in self.by_name.items() if host.is_alive}
        homes = {node: before[node] for node in wanted if before.get(node) in alive}
        self._set(name, homes)
        if missing := [node for node in wanted if node not in homes]:
            self._set(name, {**homes, **self._homes_for(missing, set(homes.values()))})
        was_unsettled = name in self.unsettled
        self.unsettled.discard(name)
        if len(self.homes.get(name, {})) < len(wanted):
            self.unsettled.add(name)
        elif was_unsettled:  # its jobs have waited for this
            self.has_room = True
        return self.homes.get(name, {}) != before

    def restore(self, name: str, homes: dict[str, str]) -> None:
        """Restores a group's homes of an earlier scheduler."""
        self._set(name, homes)

    def _set(self, name: str, homes: dict[str, str]) -> None:
        old = self.homes.pop(name, {})
        self._num_used.subtract((host, node.partition("-")[0]) for node, host in old.items())
        self._num_used.update((host, node.partition("-")[0]) for node, host in homes.items())
        self.has_room |= any(node not in homes for node in old)
        if homes:
            self.homes[name] = homes

    def of_job(self, group: str, rollout_nodes: Iterable[int], num_train_nodes: int) -> list[str] | None:
        """Returns the hosts of a member's nodes, its leader's first; None if a node has no home."""
        homes = self.homes.get(group, {})
        nodes = [f"rollout-{node}" for node in rollout_nodes]
        nodes += [f"train-{node}" for node in range(num_train_nodes)]
        return [homes[node] for node in nodes] if all(node in homes for node in nodes) else None

    def check_integrity(self) -> None:
        """Checks that no host has more nodes in use than it offers, and that they are counted."""
        used = Counter(
            (host, node.partition("-")[0]) for homes in self.homes.values() for node, host in homes.items()
        )
        assert used == +self._num_used, (used, self._num_used)
        for (host, kind), num in used.items():
            offered = self.by_name[host].num_nodes
            assert offered is None or num <= offered[Phase(kind)], f"{num} {kind} nodes in use on {host}"

    def _homes_for(self, nodes: list[str], known: set[str]) -> dict[str, str]:
        """Prefers one host, and one that the group already uses; returns {} if there is no room."""
        free = {name: self._free(name) for name, host in self.by_name.items() if host.is_alive}
        by_room = sorted(free, key=lambda name: (name not in known, -sum(free[name].values()), name))
        for name in by_room:
            if all(_count(nodes, kind) <= free[name][kind] for kind in Phase):
                return dict.fromkeys(nodes, name)
        found: dict[str, str] = {}
        for node in nodes:
            kind = node.partition("-")[0]
            host = next((name for name in by_room if free[name][kind] > 0), None)
            if host is None:
                return {}
            free[host][kind] -= 1
            found[node] = host
        return found

    def _free(self, name: str) -> dict[str, float]:
        offered = self.by_name[name].num_nodes
        return {
            kind: offered[kind] - self._num_used[name, kind.value] if offered is not None else float("inf")
            for kind in Phase
        }


def _nodes(group: Group) -> list[str]:
    """Names the nodes of a group that are in use."""
    used = sorted({node for member in group.members for node in member.rollout_nodes})
    return [*(f"rollout-{node}" for node in used), *(f"train-{n}" for n in range(group.num_train_nodes))]


def _count(nodes: Iterable[str], kind: str) -> int:
    return sum(node.startswith(kind) for node in nodes)
