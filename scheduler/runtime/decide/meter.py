"""Counts waits for permits, holds, iterations and decisions since this scheduler's start.

Counts only grow, and no decision reads them. A restart resets them, as Prometheus expects. Pure: takes
``now``.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rose.scheduler.histogram import Histogram

PERMIT_BOUNDS_S = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Phases take minutes, those of a test a hundredth of a second."""
DECISION_BOUNDS_S = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0, 5.0)


@dataclass(slots=True)
class Iterations:
    """Seconds between two completed iterations of the same attempt."""

    count: int = 0
    sum_s: float = 0.0
    worst_s: float = 0.0
    last_s: float = 0.0


@dataclass(slots=True)
class _Since:
    phase: str
    at_s: float


@dataclass(slots=True)
class Meter:
    """The counts of one scheduler. A job holds at most one permit, and waits for at most one."""

    started_s: float
    events: Counter[str] = field(default_factory=Counter)
    iterations: dict[str, Iterations] = field(default_factory=dict)
    _waits: dict[str, Histogram] = field(default_factory=dict)
    _holds: dict[str, Histogram] = field(default_factory=dict)
    _decisions: dict[str, Histogram] = field(default_factory=dict)
    _asked: dict[str, _Since] = field(default_factory=dict)
    _held: dict[str, _Since] = field(default_factory=dict)
    _completed_s: dict[str, float] = field(default_factory=dict)

    def asked(self, job: str, phase: str, now: float) -> None:
        """A phase waits from now on; asking again does not restart the wait."""
        before = self._asked.get(job)
        if before is None or before.phase != phase:
            self._asked[job] = _Since(phase, now)

    def granted(self, job: str, phase: str, now: float) -> None:
        """The phase holds its nodes from now on."""
        self._held[job] = _Since(phase, now)
        asked = self._asked.pop(job, None)
        if asked is not None:
            self._waits.setdefault(phase, Histogram(PERMIT_BOUNDS_S)).add(now - asked.at_s)

    def released(self, job: str, now: float) -> None:
        """The job has released its nodes."""
        held = self._held.pop(job, None)
        if held is not None:
            self._holds.setdefault(held.phase, Histogram(PERMIT_BOUNDS_S)).add(now - held.at_s)

    def completed(self, job: str, now: float) -> None:
        """An iteration is safe. The first of an attempt is not measured: its start is unknown."""
        before_s = self._completed_s.get(job)
        self._completed_s[job] = now
        if before_s is None:
            return
        seen = self.iterations.setdefault(job, Iterations())
        seen.count += 1
        seen.last_s = now - before_s
        seen.sum_s += seen.last_s
        seen.worst_s = max(seen.worst_s, seen.last_s)

    def paused(self, job: str, pause_s: float) -> None:
        """A move has paused the job between two iterations; neither counts the pause."""
        if job in self._completed_s:
            self._completed_s[job] += pause_s

    def dropped(self, job: str) -> None:
        """The attempt has ended. Its unfinished wait or hold counts as neither."""
        self._asked.pop(job, None)
        self._held.pop(job, None)
        self._completed_s.pop(job, None)

    def forget(self, job: str) -> None:
        """Another job has the name from now on."""
        self.dropped(job)
        self.iterations.pop(job, None)

    def decided(self, call: str, seconds: float) -> None:
        """Adds the time that one call took to decide."""
        self._decisions.setdefault(call, Histogram(DECISION_BOUNDS_S)).add(seconds)

    def waited_s(self, job: str, now: float) -> float | None:
        """Returns how long the job has waited for a permit; None if it does not wait, or if it is unknown."""
        return _age_s(self._asked.get(job), now)

    def held_s(self, job: str, now: float) -> float | None:
        """Returns how long the job has held its permit; None for none, or one of an earlier scheduler."""
        return _age_s(self._held.get(job), now)

    def to_json(self) -> dict[str, Any]:
        """Returns the counts over all jobs."""
        return {
            "events": dict(self.events),
            "waits": {phase: each.to_json() for phase, each in self._waits.items()},
            "holds": {phase: each.to_json() for phase, each in self._holds.items()},
            "decisions": {call: each.to_json() for call, each in self._decisions.items()},
        }


def _age_s(since: _Since | None, now: float) -> float | None:
    return now - since.at_s if since is not None else None
