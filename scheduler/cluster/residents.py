"""Running jobs: their remaining work, and how slow they may still be.

The values never change. Every second of work may take `slo` seconds. The part of this budget that a job did
not use is its bank, which pays for the pauses of moves; under an SLO over the lifetime it also pays for
slower iterations later. The limit is set so that at this pace the whole lifetime still keeps the SLO.
"""

from dataclasses import dataclass, replace
from typing import Self

from rose.scheduler.group.model import Job, SloKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A job as of `since_s`: `work_s` of solo time are left, and the SLO allows `bank_s` more than was used.

    `slowdown`: seconds of time per second of solo work, as promised by its group. `keeps_end`: the job leaves
    at a fixed time whatever its slowdown, as the papers' simulations have it. `stays`: it is not to be moved.
    """

    job: Job
    since_s: float
    work_s: float
    bank_s: float = 0.0
    slowdown: float = 1.0
    keeps_end: bool = False
    stays: bool = False

    @property
    def pace(self) -> float:
        """Seconds of time per second of work."""
        return 1.0 if self.keeps_end else self.slowdown

    @property
    def end_s(self) -> float:
        """When it leaves, if its group stays as it is."""
        return self.since_s + self.work_s * self.pace

    @property
    def limit_s(self) -> float:
        """The longest iteration that it may be promised."""
        job = self.job
        allowed = job.slo + self.bank_s / self.work_s if self.work_s > 0 else job.slo
        if job.slo_kind is SloKind.ITERATION:
            allowed = min(job.slo, allowed)
        return allowed * job.solo_s

    def at(self, now_s: float) -> Self:
        """Returns the same job at a later time."""
        if now_s <= self.since_s:
            return self
        done_s = min(self.work_s, (now_s - self.since_s) / self.pace)
        return replace(
            self,
            since_s=now_s,
            work_s=self.work_s - done_s,
            bank_s=self.bank_s + (self.job.slo - self.slowdown) * done_s,
        )

    def slowed(self, slowdown: float) -> Self:
        """Returns the same job at another pace from its `since_s` on."""
        return replace(self, slowdown=slowdown)

    def paused(self, pause_s: float) -> Self:
        """Returns the same job after a pause, which its bank pays for."""
        return replace(self, since_s=self.since_s + pause_s, bank_s=self.bank_s - pause_s)
