"""Whether a cyclic order keeps every job's SLO, proved by a timetable that anyone can check.

Owns: certificates and the search for the shortest timetable of a given order. Promises: a certificate's timetable
satisfies, in whole microseconds, every constraint of the order with worst-case phase times; an order without such
a timetable is refused with the job, its bound and its SLO. Never: chooses an order (search.py).

The proof: steps that follow one another, on a resource or in a job, give constraints start[v] >= start[u] +
duration[u] - passes * cycle; a job's longest iteration gives start[u] >= start[v] - limit. Such a system has a
solution for a cycle time exactly if no loop of constraints is positive (max-plus algebra). Starting with the
busiest resource or longest job, each positive loop found raises the cycle time to what that loop needs, until
there is none: the shortest cycle. Because every start is the maximum of others plus durations, phases that are
shorter than assumed can only make later ones earlier: the timetable remains an upper bound (pace.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rose.errors import RoseError
from rose.scheduler.cluster.model import Group, Job, SloKind
from rose.scheduler.group.order import CyclicOrder, PhaseKind

TICKS_PER_S = 1_000_000
"""Whole numbers, so that a check is exact. Durations are rounded up."""
SLO_TOLERANCE = 1e-6
"""Of the limit: rounding must not refuse a group that meets its SLO to the digit."""


class CertificateError(RoseError):
    """The order can't be certified: names the job, the iteration it could be promised, and its SLO."""

    def __init__(self, message: str, *, job: str, bound_s: float, limit_s: float) -> None:
        super().__init__(message)
        self.job = job
        self.bound_s = bound_s
        self.limit_s = limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBound:
    """What a job is promised: `longest_s` for every iteration, `mean_s` over a whole number of passes.

    `limit_s` is what its SLO allows of the one that `slo_kind` names.
    """

    num_iterations: int
    mean_s: float
    longest_s: float
    limit_s: float
    lead_s: float
    """How far the job may run ahead of the timetable without one iteration becoming longer than allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """`after` starts at least `ticks` later than `before`, less `passes` cycles."""

    before: int
    after: int
    ticks: int
    passes: int


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A timetable of one pass through an order, repeated every `cycle_ticks`."""

    order: CyclicOrder
    starts_ticks: tuple[int, ...]
    cycle_ticks: int
    constraints: tuple[Constraint, ...]
    bounds: Mapping[str, JobBound]
    durations_s: tuple[float, ...]
    syncs_s: tuple[float, ...]
    """After each step, until the same job's next may start."""

    @cached_property
    def cycle_s(self) -> float:
        return self.cycle_ticks / TICKS_PER_S

    @cached_property
    def starts_s(self) -> tuple[float, ...]:
        return tuple(ticks / TICKS_PER_S for ticks in self.starts_ticks)

    @cached_property
    def progress(self) -> float:
        """Iterations per second, each job's relative to running alone: the number of jobs if nobody waits."""
        return sum(bound.num_iterations for bound in self.bounds.values())

    def check(self) -> None:
        """Proves the timetable, in whole numbers and without the search. Raises: AssertionError."""
        for each in self.constraints:
            earliest = self.starts_ticks[each.before] + each.ticks - each.passes * self.cycle_ticks
            assert self.starts_ticks[each.after] >= earliest, f"{each} does not hold"
