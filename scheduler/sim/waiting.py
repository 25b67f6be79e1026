"""The simulation's queue: the jobs that wait for nodes, and whose places they take.

Owns the order in which they are tried, which is the scheduler's: by priority, then those that wait for
victims to leave, then by their teams' use of their shares, then as they came. The production rules choose the
victims (rose.scheduler.cluster.preemption). A job is placed only where it leaves room for those before it
that wait for their victims. Quotas and the bound on overtaking are left out. Pure.
"""

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rose.errors import PoolsFull
from rose.scheduler.cluster.candidates import Candidate
from rose.scheduler.cluster.groups import Cluster, Rearrangement
from rose.scheduler.cluster.policies import ClusterPolicy
from rose.scheduler.cluster.preemption import Contender, Preemption
from rose.scheduler.cluster.residents import Resident
from rose.scheduler.group.model import Job
from rose.scheduler.sim.workloads import Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A job without nodes. `resident`: what is left of one that has run before."""

    job: Job
    work_s: float
    since_s: float
    number: int
    resident: Resident | None = None


class Queue:
    """The jobs of one simulation that wait."""

    def __init__(
        self, submitted: Sequence[Submission], cluster: Cluster, policy: ClusterPolicy, rules: Preemption
    ) -> None:
        self._submitted = {one.job.name: one for one in submitted}
        self._numbers = {name: number for number, name in enumerate(self._submitted)}
        self._cluster = cluster
        self._policy = policy
        self._rules = rules
        self.waiting: dict[str, Waiting] = {}
        self.takeovers: dict[str, tuple[str, ...]] = {}
        """For each waiting job, the running jobs whose places it takes."""
        self._left_for: dict[str, tuple[str, int]] = {}
        """For each job that was preempted, by whom, and how often that one had been placed before."""
        self._num_placed: dict[str, int] = defaultdict(int)

    def add(self, job: Job, work_s: float, now: float, resident: Resident | None = None) -> None:
        """A job waits from now on."""
        number = self._numbers[job.name]
        self.waiting[job.name] = Waiting(
            job=job, work_s=work_s, since_s=now, number=number, resident=resident
        )

    def ordered(self) -> list[Waiting]:
        """Returns the waiting jobs in the order in which they are tried."""
        used = self._used({})

        def turn(each: Waiting) -> tuple[int, bool, float, int]:
            one = self._contender(each.job.name)
            use = used[one.team] / self._rules.shares.get(one.team, 1.0)
            is_next = each.job.name in self.takeovers
            return -one.priority, not is_next, 0.0 if is_next else use, each.number

        return sorted(self.waiting.values(), key=turn)

    def find(self, each: Waiting, ahead: Sequence[Waiting], now: float) -> Candidate | None:
        """Returns a place for the job that leaves room for those ahead of it; None if there is none."""
        found = self._place(self._cluster, each, now)
        others = [other for other in ahead if other.job.name in self.takeovers]
        if found is None or not others:
            return found
        return found if self._fits(each, others, (), now) else None

    def placed(self, name: str) -> None:
        """The job has nodes, and its victims are spared."""
        del self.waiting[name]
        self.takeovers.pop(name, None)
        self._num_placed[name] += 1

    def take_over(self, each: Waiting, ahead: Sequence[Waiting], now: float) -> tuple[str, ...]:
        """Decides whose places the job takes. Returns those that have not been told before."""
        name, before = each.job.name, self.takeovers.pop(each.job.name, ())
        others = [other for other in ahead if other.job.name in self.takeovers]
        taken = {victim for victims in self.takeovers.values() for victim in victims}
        running = [
            self._contender(other)
            for other in self._cluster.residents
            if other not in taken and self._left_for.get(other) != (name, self._num_placed[name])
        ]
        still = [victim for victim in before if victim in self._cluster.residents]
        if still and self._fits(each, others, still, now):
            self.takeovers[name] = tuple(still)
            return ()
        victims = self._rules.victims(
            self._contender(name),
            running,
            self._used({name: each}),
            lambda gone: self._fits(each, others, gone, now),
        )
        if victims:
            self.takeovers[name] = victims
        return tuple(victim for victim in victims if victim not in before)

    def left(self, victim: str, by: str) -> None:
        """The victim has given its place away."""
        self._left_for[victim] = by, self._num_placed[by]
        self.takeovers[by] = tuple(each for each in self.takeovers[by] if each != victim)

    def _fits(self, each: Waiting, others: Sequence[Waiting], without: Collection[str], now: float) -> bool:
        """Whether the job has a place without some, and the others still have theirs afterwards."""
        trial = copy.deepcopy(self._cluster)
        _remove(trial, without, now)
        found = self._place(trial, each, now)
        if found is None or not others:
            return found is not None
        trial.submit(each.job, now, each.work_s)
        trial.apply(Rearrangement(groups=(found.group,)), now)
        for other in others:
            later = copy.deepcopy(trial)
            _remove(later, self.takeovers[other.job.name], now)
            if self._place(later, other, now) is None:
                return False
        return True

    def _place(self, cluster: Cluster, each: Waiting, now: float) -> Candidate | None:
        cluster.submit(each.job, now, each.work_s)
        if each.resident is not None:
            cluster.residents[each.job.name] = replace(each.resident, since_s=now)
        try:
            return self._policy.place(cluster, each.job, now)
        except PoolsFull:
            return None
        finally:
            cluster.withdraw(each.job.name)

    def _used(self, without: Mapping[str, Waiting]) -> dict[str, float]:
        """Returns each team's dollars an hour when all takeovers but these jobs' are carried out."""
        used: dict[str, float] = defaultdict(float)
        takeovers = {name: victims for name, victims in self.takeovers.items() if name not in without}
        gone = {victim for victims in takeovers.values() for victim in victims}
        for name in [*(each for each in self._cluster.residents if each not in gone), *takeovers]:
            one = self._contender(name)
            used[one.team] += one.dollars_per_hour
        return used

    def _contender(self, name: str) -> Contender:
        one = self._submitted[name]
        dollars = self._cluster.pools.price(one.job.num_rollout_nodes, one.job.num_train_nodes)
        team = one.team if one.team is not None and one.team in self._rules.shares else ""
        return Contender(name=name, priority=one.priority, team=team, dollars_per_hour=dollars)


def _remove(cluster: Cluster, names: Collection[str], now: float) -> None:
    for name in names:
        if name in cluster.residents:
            cluster.remove(name, now)
