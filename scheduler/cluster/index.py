"""Every group as one row of numbers, so that a job is tested against all groups at once.

The rows are updated with every change of a group. A group that could take a job is never filtered out. If
every job is pinned to one rollout node and no job has a bank, every group that could not take it is filtered
out. The groups that remain are checked as groups, because times of jobs on several rollout nodes are only
lower bounds here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rose.scheduler.cluster.candidates import rollout_load_s
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.cluster.residents import Resident
from rose.scheduler.group.cycle import EPSILON
from rose.scheduler.group.model import Group, Job

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
_NONE = np.inf
"""Load of a node that a group doesn't have."""

_SCALARS = (
    "num_train_nodes", "num_jobs", "train_s", "train_free", "load_s", "cycle_s", "busiest_s", "limit_s",
    "end_s", "train_use", "longest_train_s", "train_spare_s",
)  # fmt: skip
_PER_NODE = ("node_s", "node_free", "node_end_s", "node_use", "node_longest_s", "node_spare_s")


@dataclass(frozen=True, slots=True)
class Fit:
    """Which groups could take the job, on which nodes, and on new nodes."""

    rows: npt.NDArray[np.intp]
    nodes: Flags
    """[of rows, node]: direct packing on that rollout node."""
    scaled: Flags
    """[of rows]: on rollout nodes of its own beside the group's training nodes."""


class GroupIndex:
    """Rows in the order in which groups came; a row given up is used again."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._row_of: dict[str, int] = {}
        self._names: list[str | None] = []
        self._free_rows: list[int] = []
        self._num_rows = 0
        self._scalars: dict[str, Floats] = {name: np.zeros(64) for name in _SCALARS}
        self._per_node: dict[str, Floats] = {name: np.full((64, 5), _NONE) for name in _PER_NODE}

    def name(self, row: int) -> str:
        """Returns the group in a row."""
        found = self._names[row]
        assert found is not None, f"row {row} is empty"
        return found

    def names(self) -> list[str]:
        """Returns all groups in the rows' order."""
        return [name for name in self._names if name is not None]

    def column(self, name: str) -> Floats:
        """Returns one number of every group."""
        return self._scalars[name][: self._num_rows]

    def node_column(self, name: str) -> Floats:
        """Returns one number of every rollout node: [group, node]."""
        return self._per_node[name][: self._num_rows]

    # Keeping --------------------------------------------------------------------------------------------

    def put(self, group: Group, residents: Sequence[Resident]) -> None:
        """A group is new or has changed. `residents` as its members."""
        row = self._row_of.get(group.name)
        if row is None:
            row = self._new_row(group.name)
        if group.num_rollout_nodes > self._per_node["node_s"].shape[1]:
            self._widen(group.num_rollout_nodes)
        limits = [resident.limit_s for resident in residents]
        train_s = [member.job.train_s_on(group.num_train_nodes) for member in group.members]
        node_s = rollout_load_s(group)
        scalars = {
            "num_train_nodes": float(group.num_train_nodes),
            "train_s": sum(train_s),
            "load_s": group.load_s,
            "cycle_s": group.cycle_s,
            "busiest_s": max(group.cycle_s, *node_s),
            "limit_s": min(limits),
            "num_jobs": float(len(group.members)),
            "train_free": float(
                self._pools.train.host_bytes - sum(member.job.train_bytes for member in group.members)
            ),
            "end_s": max(resident.end_s for resident in residents),
            "train_use": sum(time_s / limit for time_s, limit in zip(train_s, limits, strict=True)),
            "longest_train_s": max(train_s),
            "train_spare_s": min(limit - time_s for time_s, limit in zip(train_s, limits, strict=True)),
        }
        for name, value in scalars.items():
            self._scalars[name][row] = value
        for column in self._per_node.values():
            column[row] = _NONE
        for node, load_s in enumerate(node_s):
            here = [k for k, member in enumerate(group.members) if node in member.rollout_nodes]
            held = sum(group.members[k].job.rollout_bytes for k in here)
            self._per_node["node_s"][row, node] = load_s
            self._per_node["node_free"][row, node] = self._pools.rollout.host_bytes - held
            self._per_node["node_end_s"][row, node] = max(residents[k].end_s for k in here)
            times = [(group.members[k].job.rollout_s, limits[k]) for k in here]
            self._per_node["node_use"][row, node] = sum(time_s / limit for time_s, limit in times)
            self._per_node["node_longest_s"][row, node] = max(time_s for time_s, _ in times)
            self._per_node["node_spare_s"][row, node] = min(limit - time_s for time_s, limit in times)

    def remove(self, name: str) -> None:
        """A group has no members any more."""
        row = self._row_of.pop(name, None)
        if row is None:
            return
        self._names[row] = None
        self._free_rows.append(row)
        self._scalars["num_jobs"][row] = _NONE

    def _new_row(self, name: str) -> int:
        if self._free_rows:
            row = self._free_rows.pop()
            self._names[row] = name
        else:
            row = self._num_rows
            self._num_rows += 1
            self._names.append(name)
            if row == len(self._scalars["num_jobs"]):
                self._lengthen()
        self._row_of[name] = row
        return row

    def _lengthen(self) -> None:
        for name, column in self._scalars.items():
            self._scalars[name] = np.concatenate([column, np.zeros_like(column)])
        for name, columns in self._per_node.items():
            self._per_node[name] = np.concatenate([columns, np.full_like(columns, _NONE)])

    def _widen(self, num_nodes: int) -> None:
        for name, columns in self._per_node.items():
            more = np.full((len(columns), num_nodes - columns.shape[1] + 4), _NONE)
            self._per_node[name] = np.concatenate([columns, more], axis=1)

    # Asking ---------------------------------------------------------------------------------------------

    def fit(self, job: Job, limit_s: float, *, prune_saturated: bool, multi_rate: bool) -> Fit:
        """Returns where the job could go. `limit_s`: the longest iteration that it may be promised."""
        column, more = self.column, 1 + EPSILON
        own_train_s = job.train_s * job.num_train_nodes
        fits = column("num_jobs") < self._pools.max_residents
        if job.train_bytes:
            fits &= column("train_free") >= job.train_bytes
        if prune_saturated:
            fits &= column("load_s") < column("cycle_s")
        rows = np.flatnonzero(fits)
        train_s = own_train_s / column("num_train_nodes")[rows]
        limit = np.minimum(column("limit_s")[rows], limit_s) * more
        alone = train_s <= limit_s * more - (job.rollout_s + job.outside_s)
        in_turn = alone & (train_s <= limit - (job.rollout_s + job.outside_s))
        in_turn &= (column("train_s")[rows] + train_s <= limit) & (column("busiest_s")[rows] <= limit)
        any_way = in_turn
        if multi_rate:
            # What any timetable needs: room in all, and within either job's limit for two phases in a row.
            rated = alone & (column("train_use")[rows] + train_s / limit_s <= more)
            rated &= column("longest_train_s")[rows] + train_s <= limit_s * more
            rated &= train_s <= column("train_spare_s")[rows] + limit_s * EPSILON
            any_way = in_turn | rated
        kept = np.flatnonzero(any_way)
        rows, limit = rows[kept], limit[kept]
        node_s = self.node_column("node_s")[rows] + job.rollout_s
        nodes = in_turn[kept, None] & (node_s <= limit[:, None])
        if multi_rate:
            room = self.node_column("node_use")[rows] + job.rollout_s / limit_s <= more
            room &= self.node_column("node_longest_s")[rows] + job.rollout_s <= limit_s * more
            room &= job.rollout_s <= self.node_column("node_spare_s")[rows] + limit_s * EPSILON
            nodes |= rated[kept, None] & room
        if job.rollout_bytes:
            nodes &= self.node_column("node_free")[rows] >= job.rollout_bytes
        return Fit(rows, nodes, any_way[kept])

    def check_integrity(self, groups: Mapping[str, Group]) -> None:
        """One row for each group, and its loads are the group's."""
        assert sorted(self._row_of) == sorted(groups), "rows and groups differ"
        assert sorted(self.names()) == sorted(groups)
        for name, row in self._row_of.items():
            assert self._names[row] == name
            assert self._scalars["num_jobs"][row] == len(groups[name].members)
            loads = self._per_node["node_s"][row]
            assert loads[np.isfinite(loads)].tolist() == rollout_load_s(groups[name])
