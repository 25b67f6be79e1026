"""Takeovers: which queued jobs take the places of which running ones.

Owns takeovers from the decision until the victims are back in the queue, or are spared because the queued job
is placed, cancelled or held before. The rules are those of rose.scheduler.cluster.preemption. A victim ends
its iteration where it is (move_calls.py), and goes back to the queue when its process has ended
(job_calls.py). Pure: takes ``now``.
"""

import math
from collections import defaultdict
from collections.abc import Mapping

from rose.scheduler.cluster.preemption import Contender, Fits
from rose.scheduler.runtime.decide.job_calls import JobCalls
from rose.scheduler.runtime.decide.records import GivesWay, JobState
from rose.scheduler.runtime.decide.state import State
from rose.scheduler.runtime.job.spec import RunSpec

MAX_TAKEOVERS = 8
"""The most jobs of a priority and above that wait for victims at a time. Each search looks at all of them."""


class PreemptCalls:
    """The takeovers of all queued jobs."""

    def __init__(self, state: State, jobs: JobCalls) -> None:
        self._state = state
        self._jobs = jobs
        self._rules = state.cluster.to_preemption()
        self._pools = state.cluster.to_pools()
        self._lowest = -math.inf
        """No running job has a lower priority: most queued jobs need not look at the running ones."""
        self.review()

    def review(self) -> None:
        """Spares the victims of jobs that no longer wait, and forgets victims that are gone.

        Call it when a job has been placed.
        """
        running = (name for name in self._state.live if self._state.jobs[name].state is JobState.RUNNING)
        self._lowest = min((self._state.specs[name].priority for name in running), default=math.inf)
        for name, victims in list(self._state.takeovers.items()):
            is_queued = self._state.jobs[name].state is JobState.QUEUED
            placed = tuple(each for each in victims if self._gives_way_to(each) == name)
            self._decide(name, placed if is_queued else None)

    def victims(self, spec: RunSpec, fits: Fits) -> tuple[str, ...]:
        """Returns the running jobs whose places the job would take."""
        if spec.priority < self._lowest or (spec.priority == self._lowest and not self._rules.by_share):
            return ()
        job, used = self._contender(spec), self._used(spec.name)
        return self._rules.victims(job, self._running(spec), used, fits)

    def take_over(self, name: str, fits: Fits, now: float) -> bool:
        """Decides whose places a queued job takes. Returns whether it takes any."""
        before, priority = self._state.takeovers.get(name, ()), self._state.specs[name].priority
        others = [each for each in self._state.takeovers if self._state.specs[each].priority >= priority]
        if name not in others and len(others) >= MAX_TAKEOVERS:
            return False
        leaving = tuple(each for each in before if self._state.jobs[each].state is JobState.PREEMPTING)
        if before and self._rules.is_on and fits(before):
            victims = before
            for victim in before if len(before) > 1 else ():
                rest = tuple(each for each in victims if each != victim)
                victims = rest if victim not in leaving and fits(rest) else victims
        else:
            spec = self._state.specs[name]
            victims = (*leaving, *self.victims(spec, lambda gone: fits((*leaving, *gone))))
        self._decide(name, victims or None)
        for victim in victims:
            if self._state.jobs[victim].host is None and self._gives_way_to(victim) == name:
                self._jobs.requeue(victim, now)  # it has no process that would have to end
        if victims:  # those that have just left are nobody's victims any more
            self._decide(name, tuple(each for each in victims if self._gives_way_to(each) == name))
        return bool(victims)

    def _decide(self, name: str, victims: tuple[str, ...] | None) -> None:
        before = self._state.takeovers.get(name, ())
        for victim in set(before) - set(victims or ()):
            if self._state.jobs[victim].state is JobState.RUNNING:
                self._set(victim, None)
                self._state.event("preemption_dropped", victim, by=name)
        for victim in victims or ():
            if victim not in before:
                job = self._contender(self._state.specs[name])
                why = self._rules.why(job, self._contender(self._state.specs[victim]))
                self._set(victim, GivesWay(to=name, why=why))
                self._state.event("preemption_decided", victim, by=name, reason=why)
        if victims != self._state.takeovers.get(name):
            self._state.take_places(name, victims)

    def _set(self, victim: str, gives_way: GivesWay | None) -> None:
        record = self._state.jobs[victim]
        record.gives_way = gives_way
        self._state.changed(victim)
        self._state.groups.touch(record.group)  # the policy moves no job that leaves

    def _gives_way_to(self, name: str) -> str | None:
        record = self._state.jobs[name]
        gives_way = record.gives_way if record.state.is_placed else None
        return gives_way.to if gives_way is not None else None

    def _running(self, by: RunSpec) -> list[Contender]:
        """Returns the jobs that this one may preempt at all, the oldest first."""
        waiting, found = self._state.jobs.get(by.name), []
        for name in self._state.live:
            record, spec = self._state.jobs[name], self._state.specs[name]
            if by.group not in (None, record.group) and (by.team is None or by.team != spec.team):
                continue  # it makes room neither in the group that the job names nor in its team's quota
            is_going = record.is_leaving or record.next_place is not None
            if record.state is not JobState.RUNNING or is_going:
                continue
            if self._gives_way_to(name) not in (None, by.name) or not self._may_come_back(spec):
                continue
            has_left_for = {(each.by_number, each.by_attempt) for each in record.preemptions}
            if waiting is not None and (waiting.number, waiting.attempt) in has_left_for:
                continue  # it has left for this job before, which found no place all the same
            found.append((record.placed_s or 0.0, self._contender(spec)))
        return [contender for _, contender in sorted(found, key=lambda each: each[0])]

    def _may_come_back(self, spec: RunSpec) -> bool:
        """Whether the job can be started again; a group that was formed for jobs may be gone by then."""
        return spec.max_restarts > 0 and (spec.group is None or spec.group in self._state.cluster.groups)

    def _contender(self, spec: RunSpec) -> Contender:
        nodes = (spec.phases["rollout"].nodes, spec.phases["train"].nodes)
        return Contender(
            name=spec.name,
            priority=spec.priority,
            team=self._state.cluster.team_of(spec),
            dollars_per_hour=self._pools.price(*nodes),
        )

    def _used(self, by: str) -> Mapping[str, float]:
        """Returns each team's use as it will be when all other takeovers are carried out."""
        used = defaultdict[str, float](float)
        for name in self._state.live:
            is_placed, gives_way_to = self._state.jobs[name].state.is_placed, self._gives_way_to(name)
            is_victim = gives_way_to is not None and gives_way_to != by
            if name != by and ((is_placed and not is_victim) or name in self._state.takeovers):
                contender = self._contender(self._state.specs[name])
                used[contender.team] += contender.dollars_per_hour
        return used
