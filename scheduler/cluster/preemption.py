"""Preemption: which running jobs give their places to a waiting one.

Owns the choice of victims and the least time that a job runs. A job may take the place of any running job of
lower priority. If the cluster's file says so, a job of equal priority may as well, if its team, with the
job's nodes, uses less for its share than the victim's team now. Only victims that are needed are chosen,
those of the lowest priority first. Pure.

Cycles are impossible. A job that has taken a place is not preempted before it has completed an iteration
there. A job that gave its place to another job gives it to the same one again only if that one has started
since. So each preemption is followed by an iteration. A preemption for the share replaces the use of one team
by a smaller one, so that two teams never take a place from each other in turn.
"""

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

_ROUNDING = 1e-9
"""The relative rounding of sums of dollars."""
MAX_VICTIMS = 64
"""No job takes the places of more. A search looks at this many of the lowest jobs, and at as many more of the
job's own team, because only those make room in the team's quota. It asks for a place four times as often at
most."""

Fits = Callable[[Collection[str]], bool]
"""Whether the waiting job has a place if these running jobs leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A job that waits or runs, as preemption sees it."""

    name: str
    priority: int = 0
    team: str = ""
    """Empty: the team of all jobs without one."""
    dollars_per_hour: float = 0.0
    """What the nodes cost that it asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """The rules of one cluster."""

    by_priority: bool = False
    by_share: bool = False
    min_run_s: float = 0.0
    """A job runs at least this long before it gives its place away."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Each team's share; 1 for a team that it lacks."""

    @property
    def is_on(self) -> bool:
        """Whether any job may be preempted."""
        return self.by_priority or self.by_share

    def victims(
        self, job: Contender, running: Sequence[Contender], used: Mapping[str, float], fits: Fits
    ) -> tuple[str, ...]:
        """Returns the running jobs that give their places to a job that has none; empty if none may.

        running: the jobs that may be preempted at all, the oldest first; among equals the latest is chosen
        first. used: the dollars an hour of the nodes that each team uses, after the preemptions that are
        decided.
        """
        below = self._below(job, running, used)
        own = {each.name for each in running if each.team and each.team == job.team}
        more = [name for name in below[MAX_VICTIMS:] if name in own]
        found = [*below[:MAX_VICTIMS], *more[:MAX_VICTIMS]]
        num = 1  # one is mostly enough, and each question costs a search for a place
        while num < len(found) and not fits(found[:num]):
            num *= 2
        if not found or (num >= len(found) and not fits(found)):
            return ()
        first, last = num // 2 + 1, min(num, len(found))
        num = bisect.bisect_left(range(last), True, lo=first, key=lambda count: fits(found[:count]))
        needed = found[:num]
        for name in reversed(needed[:-1]):  # without the last one of them it does not fit
            rest = [each for each in needed if each != name]
            needed = rest if fits(rest) else needed
        return tuple(needed) if len(needed) <= MAX_VICTIMS else ()

    def may_leave(self, ran_s: float) -> bool:
        """Returns whether a job that has run for this long since it was placed gives its place away."""
        return ran_s >= self.min_run_s

    def why(self, job: Contender, victim: Contender) -> str:
        """Says why the job may take the victim's place."""
        if job.priority > victim.priority:
            return f"priority {job.priority} over {victim.priority}"
        return f"{_team(job)} uses less for its share than {_team(victim)}"

    def _below(self, job: Contender, running: Sequence[Contender], used: Mapping[str, float]) -> list[str]:
        """Names the jobs whose places the job may take, the first victim first."""
        left = dict(used)
        ordered = sorted(reversed(running), key=lambda each: (each.priority, -self._use(each.team, left)))
        found = []
        for each in ordered:
            if each.priority < job.priority and self.by_priority:
                found.append(each.name)
            elif each.priority == job.priority and self.by_share and each.team != job.team:
                use = self._use(job.team, left, job.dollars_per_hour)
                if use * (1 + _ROUNDING) < self._use(each.team, left):
                    found.append(each.name)
                    left[each.team] = left.get(each.team, 0.0) - each.dollars_per_hour
        return found

    def _use(self, team: str, used: Mapping[str, float], more: float = 0.0) -> float:
        return (used.get(team, 0.0) + more) / self.shares.get(team, 1.0)


def _team(job: Contender) -> str:
    return f"team {job.team}" if job.team else "the team of jobs without one"
