"""A certified group in motion, without waiting: the permit book and pace, driven with given phase times.

Owns the clock and the list of what ends when. The same phase times give the same history. Failures of nodes
are not modelled.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rose.scheduler.group.certificate import Certificate
from rose.scheduler.group.model import Phase, SloKind
from rose.scheduler.group.pace import Pace
from rose.scheduler.group.permits import Permit, PermitBook

NO_LEASE_S = 1e12
"""The lease of a replay, in which nobody dies."""
TOLERANCE_S = 1e-5
"""The rounding of sums of floats against whole microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """How long a phase runs; `freed_s`: when its tail has been moved aside, if that is earlier.

    `freed`: the resources that this frees; None: all, with the tail as a guest of who comes next.
    """

    done_s: float
    freed_s: float | None = None
    freed: tuple[int, ...] | None = None


PhaseModel = Callable[[Permit, int], PhaseTimes]
"""Times of the phase that a permit lets run, in that iteration of the job."""


@dataclass(slots=True)
class IterationTimes:
    """When each iteration's rollout started, and when its training and what follows were done."""

    starts_s: dict[str, list[float]] = field(default_factory=dict)
    ends_s: dict[str, list[float]] = field(default_factory=dict)
    longest_delay_s: float = 0.0

    def violations(self, certificate: Certificate) -> list[str]:
        """Lists where the history is worse than the certificate promised."""
        found = []
        if self.longest_delay_s > TOLERANCE_S:
            found.append(f"the group is {self.longest_delay_s:g} s behind its timetable")
        for name, bound in certificate.bounds.items():
            starts = self.starts_s[name]
            longest_s = max((after - start for start, after in itertools.pairwise(starts)), default=0.0)
            allowed_s = bound.longest_s + bound.lead_s
            if bound.slo_kind is SloKind.ITERATION and longest_s > allowed_s + TOLERANCE_S:
                found.append(f"job {name}: an iteration of {longest_s:g} s, {allowed_s:g} s promised")
            # The timetable begins with the group: a job waits at most one pass for its first step.
            ends = self.ends_s[name]
            late_s = ends[-1] - certificate.cycle_s - len(ends) * bound.mean_s if ends else 0.0
            if late_s > bound.longest_s + TOLERANCE_S:
                found.append(f"job {name}: {late_s:g} s behind its mean iteration of {bound.mean_s:g} s")
        return found


def replay(
    certificate: Certificate,
    times_of: PhaseModel,
    num_passes: int,
    *,
    with_pace: bool = True,
    leaves_s: Mapping[str, float] | None = None,
) -> IterationTimes:
    """Runs every job's iterations of `num_passes` passes, or until it leaves, as soon as permits allow.

    A job that has done all of its iterations leaves too, and its steps stay empty.
    """
    return _Replay(
        certificate, times_of, num_passes, with_pace, leaves_s if leaves_s is not None else {}
    ).run()


class _Replay:
    def __init__(
        self,
        certificate: Certificate,
        times_of: PhaseModel,
        num_passes: int,
        with_pace: bool,
        leaves_s: Mapping[str, float],
    ) -> None:
        self._certificate = certificate
        self._times_of = times_of
        self._pace = Pace(certificate, 0.0)
        self._book = PermitBook(
            certificate.order,
            lease_s=NO_LEASE_S,
            pace=self._pace if with_pace else None,
        )
        self._left = {name: num_passes * bound.num_iterations for name, bound in certificate.bounds.items()}
        self._history = IterationTimes({name: [] for name in self._left}, {name: [] for name in self._left})
        self._with_pace = with_pace
        self._events: list[tuple[float, int, str, str]] = []
        self._freed: dict[str, tuple[int, ...] | None] = {}
        self._num_events = 0
        for name in self._left:
            self._add(0.0, Phase.ROLLOUT, name)
        for name, time_s in leaves_s.items():
            self._add(time_s, "leave", name)

    def run(self) -> IterationTimes:
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] <= now:
                _, _, what, name = heapq.heappop(self._events)
                if name and self._left[name] > 0:
                    self._happen(what, name, now)
            for permit in self._book.advance(now):
                self._begin(permit, now)
            if self._with_pace:
                self._history.longest_delay_s = max(self._history.longest_delay_s, self._pace.delay_s(now))
                wake_s = self._book.next_wake_s(now)
                if wake_s is not None and now < wake_s < NO_LEASE_S:
                    self._add(wake_s, "wake", "")
        return self._history

    def _happen(self, what: str, name: str, now: float) -> None:
        if what == "leave":
            self._left[name] = 0
            self._book.leave(name, now)
            return
        permit = self._book.permit_of(name) if what in ("tail", "done") else None
        if what == "tail" and permit is not None:
            freed = self._freed[name]
            self._book.begin_tail(name, permit.epoch, permit.resources if freed is None else freed, now)
        elif what == "done" and permit is not None:
            self._book.release(name, permit.epoch, now)
            self._after(permit, now)
        elif what in (Phase.ROLLOUT, Phase.TRAIN):
            self._book.request(name, Phase(what), now)

    def _begin(self, permit: Permit, now: float) -> None:
        name = permit.job
        iteration = len(self._history.ends_s[name])
        if permit.kind is Phase.ROLLOUT:
            self._history.starts_s[name].append(now)
        times = self._times_of(permit, iteration)
        if times.freed_s is not None:
            self._freed[name] = times.freed
            self._add(now + times.freed_s, "tail", name)
        self._add(now + times.done_s, "done", name)

    def _after(self, permit: Permit, now: float) -> None:
        name = permit.job
        gap_s = self._certificate.gaps_s[permit.step_number % len(self._certificate.order.steps)]
        if permit.kind is Phase.ROLLOUT:
            self._add(now + gap_s, Phase.TRAIN, name)
            return
        self._history.ends_s[name].append(now + gap_s)
        self._left[name] -= 1
        if self._left[name] > 0:
            self._add(now + gap_s, Phase.ROLLOUT, name)
        else:
            self._book.leave(name, now)

    def _add(self, time_s: float, what: str, name: str) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, what, name))
