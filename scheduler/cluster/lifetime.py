"""The policy `lifetime`: the group where a job adds the fewest dollars until all its members have left.

Chooses by that cost for arrivals, and finds the few moves that pay for themselves. Every candidate is
certified. A move's pause is within the job's SLO budget and is paid for. A move gains at least
`least_gain_dollars` (hysteresis). This policy is ours: WEAVE looks at the present dollars per hour, and never
moves jobs.

An arrival is decided in two stages: the index gives every group's cost as if nobody were slowed, and the few
cheapest are walked to the end.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rose.scheduler.cluster.candidates import Candidate, CandidateKind, candidates, check
from rose.scheduler.cluster.dollars import lifetime_dollars
from rose.scheduler.cluster.groups import Cluster, Rearrangement, residents_of
from rose.scheduler.cluster.policies import alone
from rose.scheduler.cluster.residents import Resident
from rose.scheduler.group.model import Group, Job, Member

_MAX_MOVERS = 64
"""Jobs that are tried for a move at one event; those of small groups come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A certified candidate and what it adds until the end."""

    dollars: float
    candidate: Candidate


class Lifetime:
    """`multi_rate`: groups may leave the common cycle. `num_candidates`: candidates that are walked."""

    def __init__(
        self,
        *,
        multi_rate: bool = False,
        max_moves: int = 2,
        least_gain_dollars: float = 0.5,
        num_candidates: int = 8,
    ) -> None:
        self.name = "lifetime-multirate" if multi_rate else "lifetime"
        self.max_moves = max_moves
        self._multi_rate = multi_rate
        self._least_gain_dollars = least_gain_dollars
        self._num_candidates = num_candidates

    def place(self, cluster: Cluster, job: Job, now_s: float) -> Candidate:
        newcomer = cluster.residents.get(job.name) or _newcomer(cluster, job, now_s)
        own_s = newcomer.end_s - now_s
        own = cluster.pools.price(job.num_rollout_nodes, job.num_train_nodes) * own_s / 3600
        best = self._best(cluster, newcomer, now_s, own)
        return best.candidate if best is not None else alone(cluster, job)

    def movable(self, cluster: Cluster) -> list[str]:
        """Returns the jobs of the smallest groups first, because giving a small group up saves the most."""
        chosen, num = [], 0
        for group in sorted(cluster.groups.values(), key=lambda group: len(group.members)):
            num += len(group.members)
            if num > _MAX_MOVERS:
                break
            chosen.append(group.name)
        return chosen

    def rearrange(
        self, cluster: Cluster, now_s: float, max_moves: int, leave: Sequence[str] | None = None
    ) -> Rearrangement | None:
        best_gain, best = self._least_gain_dollars, None
        for group in map(cluster.groups.get, leave if leave is not None else self.movable(cluster)):
            if group is None:  # its last job has left since it was named
                continue
            members = list(residents_of(cluster, group, now_s))
            cost = lifetime_dollars(group, members, now_s, cluster.pools)
            is_pair = max_moves > 1 and len(members) == 2
            targets = []
            for mover in members:
                rest = cluster.without(mover.job.name)
                stay = [resident for resident in members if resident is not mover]
                saved = cost - lifetime_dollars(rest, stay, now_s, cluster.pools)
                # The savings of a pair are known only when both have gone.
                most = cost if is_pair else saved - best_gain
                paused = mover.at(now_s).paused(cluster.pause_s)
                if mover.stays or most <= 0 or paused.limit_s < mover.job.solo_s:
                    continue
                target = self._best(cluster, paused, now_s, most, leave=group.name)
                if target is None:
                    continue
                targets.append(target)
                if saved - target.dollars > best_gain:
                    best_gain = saved - target.dollars
                    best = Rearrangement(
                        groups=(target.candidate.group, rest),
                        moved=(mover.job.name,),
                        gain_dollars=best_gain,
                    )
            if is_pair and len(targets) == 2 and cost - sum(each.dollars for each in targets) > best_gain:
                after = [target.candidate.group for target in targets]
                given_back = replace(group, members=(), num_rollout_nodes=0, num_train_nodes=0, iterations=())
                moved = tuple(target.candidate.job.name for target in targets)
                gain = cost - sum(each.dollars for each in targets)
                pair = Rearrangement(groups=(*after, given_back), moved=moved, gain_dollars=gain)
                if after[0].name != after[1].name and cluster.has_nodes_for(pair):
                    best_gain, best = gain, pair
        return best

    # Where to ---------------------------------------------------------------------------------------------

    def _best(
        self, cluster: Cluster, newcomer: Resident, now_s: float, most: float, leave: str | None = None
    ) -> _Target | None:
        """The certified candidate that adds the fewest dollars, below `most`; none in the group `leave`."""
        job = newcomer.job

        def limit_s(one: Job) -> float:
            return newcomer.limit_s if one.name == job.name else cluster.limit_s(one)

        best: _Target | None = None
        for least, candidate in self._promising(cluster, newcomer, now_s, leave):
            if least >= most:
                break
            found = check(
                candidate,
                cluster.pools,
                limit_s,
                multi_rate=self._multi_rate,
                num_free=cluster.num_free_rollout_nodes,
            )
            if not isinstance(found, Candidate):
                continue
            before = cluster.groups[found.group.name]
            residents = {one.job.name: one for one in residents_of(cluster, before, now_s)}
            cost = lifetime_dollars(before, list(residents.values()), now_s, cluster.pools)
            residents[job.name] = newcomer
            members = [residents[member.job.name] for member in found.group.members]
            more = lifetime_dollars(found.group, members, now_s, cluster.pools) - cost
            if more < most:
                most, best = more, _Target(dollars=more, candidate=found)
        return best

    def _promising(
        self, cluster: Cluster, newcomer: Resident, now_s: float, leave: str | None
    ) -> Iterator[tuple[float, Candidate]]:
        """The candidates that look cheapest, with what they add at least: as if nobody were slowed."""
        index, job, pools = cluster.index, newcomer.job, cluster.pools
        fit = index.fit(job, newcomer.limit_s, prune_saturated=False, multi_rate=self._multi_rate)
        rows = fit.rows
        if not len(rows):
            return
        end_s = newcomer.end_s
        train_s = np.maximum(0.0, end_s - index.column("end_s")[rows]) * index.column("num_train_nodes")[rows]
        train = train_s * pools.train.dollars_per_node_hour
        node_price = pools.rollout.dollars_per_node_hour * job.num_rollout_nodes
        longer_s = np.maximum(0.0, end_s - index.node_column("node_end_s")[rows])
        direct = np.where(fit.nodes, train[:, None] + longer_s * node_price, np.inf)
        scaled = np.where(fit.scaled, train + (end_s - now_s) * node_price, np.inf)
        cost = np.column_stack([scaled, direct]) / 3600
        # Placements by their cost: entry 0 of a row is new nodes, entry 1 + n is node n.
        flat, num = cost.ravel(), self._num_candidates
        some = np.argpartition(flat, num)[:num] if num < len(flat) else np.arange(len(flat))
        seen: set[int] = set()
        for entry in heapq.nsmallest(num, some.tolist(), key=flat.__getitem__):
            row, place = divmod(entry, cost.shape[1])
            name = index.name(int(rows[row]))
            if flat[entry] == np.inf or name == leave:
                continue
            group = cluster.groups[name]
            if job.num_rollout_nodes == 1:
                node = place - 1 if place else group.num_rollout_nodes
                yield flat[entry], _on_node(cluster, group, job, node)
            elif row not in seen:
                seen.add(row)
                for candidate in candidates(group, job, pools):
                    yield flat[entry], candidate


def _on_node(cluster: Cluster, group: Group, job: Job, node: int) -> Candidate:
    """The candidate on one rollout node; the number past the last stands for a new node."""
    num_new = int(node == group.num_rollout_nodes)
    grown = replace(
        group,
        num_rollout_nodes=group.num_rollout_nodes + num_new,
        members=(*group.members, Member(job=job, rollout_nodes=(node,))),
    )
    return Candidate(
        job=job,
        kind=CandidateKind.SCALED if num_new else CandidateKind.DIRECT,
        group=grown,
        num_new_nodes=num_new,
        dollars_per_hour=cluster.pools.price(num_new, 0),
    )


def _newcomer(cluster: Cluster, job: Job, now_s: float) -> Resident:
    return Resident(
        job=job, since_s=now_s, work_s=job.solo_s * job.num_iterations, keeps_end=cluster.keeps_ends
    )
