"""One group's permits, across joins and restarts: who holds which nodes, and who is next.

Owns the group's permit book and its pace, the permits and requests as jobs see them (iteration, epoch), and
the leases. Permits are issued in the certified order of the book, and none so early that a later iteration
could become longer than certified. A join and a new scheduler leave the permits that are held in force. Each
permit's epoch is higher than all before. Pure: takes ``now``; sends nothing.

A join makes a new book, whose order continues where the old one is. A new scheduler restores book and pace
from two rows. A job that leaves keeps an empty place in the order until the next job joins, because removing
a place can slow the others. Leases are watched here and not by the book: the book would pass a dead holder's
nodes on at once, and here the holder's process is ended first.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rose.scheduler.group.certificate import Certificate, certify
from rose.scheduler.group.cycle import depends_on_order
from rose.scheduler.group.line import BookState
from rose.scheduler.group.model import Group, Phase
from rose.scheduler.group.order import TRAIN_POOL, CyclicOrder, order_by_name, own_order
from rose.scheduler.group.pace import ROUNDING_S, Pace, PaceState
from rose.scheduler.group.permits import PermitBook

ASK_AGAIN_S = 0.25
"""The time after which a job that may not join its group's order yet asks again."""


@dataclass(slots=True, kw_only=True)
class Hold:
    """A permit that is out."""

    job: str
    phase: Phase
    iteration: int
    epoch: int
    until_s: dict[int, float]
    """When the lease of each rank ends that has not released its nodes yet."""
    silent: tuple[int, ...] = ()
    """The ranks whose lease has run out. The job's processes have been told to end."""

    @property
    def expires_s(self) -> float:
        """The time at which the first lease ends."""
        return min(self.until_s.values())

    def renew(self, until_s: float) -> None:
        """Gives every rank that holds the permit a lease until then."""
        self.until_s = dict.fromkeys(self.until_s, until_s)


class HoldRow(msgspec.Struct, kw_only=True):
    """A permit that is out, for the next scheduler."""

    job: str
    phase: Phase
    iteration: int
    epoch: int
    granted_s: float
    ranks: list[int] = msgspec.field(default_factory=lambda: [0])
    """Those that have not released it."""


class PermitsRow(msgspec.Struct, kw_only=True):
    """The row that changes with every permit. Times are of ``clock``; ``at_s`` is the latest of them."""

    clock: str
    at_s: float
    holds: list[HoldRow]
    book: BookState
    pace: PaceState


class OrderRow(msgspec.Struct, kw_only=True):
    """The row that changes when a job joins: the certified group, and the job of each iteration in a pass."""

    group: Group
    jobs: list[str]
    limits_s: dict[str, float] = msgspec.field(default_factory=dict)
    """What the certificate allows each job."""


class GroupPermits:
    """One group, without members before `form`. ``clock`` names the clock that every ``now`` is read from."""

    def __init__(self, lease_s: float, clock: str) -> None:
        self.lease_s = lease_s
        self.holds: dict[str, Hold] = {}
        """Each job's permit: a job holds nodes of one pool at a time."""
        self._clock = clock
        self._now = 0.0
        self._asks: dict[str, tuple[Phase, int, int]] = {}
        """For each job that waits: phase, iteration, number of ranks."""
        self._group: Group | None = None
        self._certificate: Certificate | None = None
        self._book: PermitBook | None = None
        self._pace: Pace | None = None

    def order_for(self, group: Group) -> CyclicOrder:
        """Returns the group's order, from where the group is in it. `sequence` says who is next now.

        Where any round-robin order is as good, known members go on as they follow now, before new ones.
        """
        iterations = own_order(group).iterations
        sequence = self._book.sequence() if self._book is not None else []
        known = [name for name in sequence if name in iterations]
        if not group.iterations and not depends_on_order(group):
            return order_by_name(group, [*known, *(name for name in iterations if name not in known)])
        present = [name for name in known if self._book is not None and self._book.is_present(name)]
        rotations = [(*iterations[first:], *iterations[:first]) for first in range(len(iterations))]
        return order_by_name(group, min(rotations, key=lambda each: _num_iterations(each, present)))

    def form(self, group: Group, certificate: Certificate, now: float) -> None:
        """Takes the group's members, certified in the order of `order_for`. Held permits stay held.

        The members go on in the first place of the new order in which no iteration in progress becomes
        longer than allowed; without one, in that in which the longest does so by least.
        """
        old, self._now = self._book, now
        if old is None:
            self._book, self._pace = self._begin(group, certificate, now)
            return
        least_s = math.inf
        for rollout, step in enumerate(certificate.order.steps):
            if step.kind is Phase.ROLLOUT and least_s > ROUNDING_S:
                book, pace = self._begin(group, certificate, now)
                book.take_over(old, now, behind=rollout - 1)
                if (late_s := book.late_s(now)) < least_s:
                    least_s, self._book, self._pace = late_s, book, pace

    def _begin(self, group: Group, certificate: Certificate, now: float) -> tuple[PermitBook, Pace]:
        self._group, self._certificate, pace = group, certificate, Pace(certificate, now)
        for name in certificate.bounds:
            pace.leave(name)  # until it asks
        # A transfer of weights or a checkpoint is no absence.
        gaps_s = (member.job.after_s(phase) for member in group.members for phase in Phase)
        between_s = self.lease_s + max(gaps_s, default=0.0)
        return PermitBook(certificate.order, lease_s=self.lease_s, between_s=between_s, pace=pace), pace

    @property
    def order_of_jobs(self) -> list[str]:
        """The job of each iteration in a pass, including jobs that left since the last join."""
        return list(self._certificate.order.iterations) if self._certificate is not None else []

    def limits_s(self) -> dict[str, float]:
        """Returns what the certificate allows each job; nothing before `form`."""
        bounds = self._certificate.bounds if self._certificate is not None else {}
        return {name: bound.limit_s for name, bound in bounds.items()}

    def drop(self, job: str, now: float) -> None:
        """Frees what the job holds, forgets its request, and passes over its place in the order."""
        self.holds.pop(job, None)
        self._asks.pop(job, None)
        self._now = now
        if self._book is not None:
            self._book.leave(job, now)

    def ask(self, job: str, phase: Phase, iteration: int, num_ranks: int = 1) -> None:
        """Queues a phase. Repeating the call changes nothing."""
        self._asks[job] = phase, iteration, num_ranks

    def grant(self, now: float) -> list[Hold]:
        """Issues the permits that are due, and returns them. Call it after each change and periodically."""
        self._now = now
        book = self._book
        if book is None:
            return []
        for hold in self.holds.values():
            book.heartbeat(hold.job, hold.epoch, now)
        for job, (phase, *_) in self._asks.items():
            book.request(job, phase, now)
        granted = []
        for permit in book.advance(now):
            phase, iteration, num_ranks = self._asks.pop(permit.job)
            hold = Hold(
                job=permit.job,
                phase=phase,
                iteration=iteration,
                epoch=permit.epoch,
                until_s=dict.fromkeys(range(num_ranks), now + self.lease_s),
            )
            self.holds[permit.job] = hold
            granted.append(hold)
        return granted

    def next_wake_s(self, now: float) -> float | None:
        """Returns when `grant` or the end of a lease is next due without another call; None: never."""
        if self._book is None:
            return None
        times = [hold.expires_s for hold in self.holds.values()]
        if any(not self._book.is_waiting(job) for job in self._asks):  # it may not join yet, and asks again
            times.append(now + ASK_AGAIN_S)
        wake_s = self._book.next_wake_s(now)
        return min(times if wake_s is None else [*times, wake_s], default=None)

    def beat(self, job: str, epoch: int, now: float, rank: int = 0) -> bool:
        """Renews a rank's lease; False if the job holds no permit of this epoch."""
        hold = self.holds.get(job)
        if hold is None or hold.epoch != epoch:
            return False
        if not hold.silent and rank in hold.until_s:
            hold.until_s[rank] = now + self.lease_s
        return True

    def renew(self, now: float) -> None:
        """Gives every holder a whole lease, after a time in which no heartbeat could be heard."""
        for hold in self.holds.values():
            hold.renew(now + self.lease_s)

    def release(self, job: str, epoch: int, now: float, rank: int = 0) -> bool:
        """A rank is done; the last one ends the permit. False if the job no longer holds it."""
        hold = self.holds.get(job)
        if hold is None or hold.epoch != epoch:
            return False
        assert self._book is not None
        self._now = now
        hold.until_s.pop(rank, None)
        if not hold.until_s:
            self._book.release(job, hold.epoch, now)
            del self.holds[job]
        return True

    def held_s(self, job: str, epoch: int, now: float, rank: int = 0) -> float | None:
        """Returns how long the job has held this permit; None unless this rank is the last that holds it."""
        hold = self.holds.get(job)
        if hold is None or hold.epoch != epoch or hold.until_s.keys() != {rank}:
            return None
        assert self._book is not None
        permit = self._book.permit_of(job)
        return now - permit.granted_s if permit is not None else None

    @property
    def certificate(self) -> Certificate:
        """The certificate of the order. Call `form` first."""
        assert self._certificate is not None
        return self._certificate

    def present(self) -> Group:
        """Returns the group without the members that are absent from its order."""
        assert self._group is not None and self._book is not None
        book = self._book
        absent = (each.job.name for each in self._group.members if not book.is_present(each.job.name))
        return functools.reduce(Group.without, absent, self._group)

    def granted_s(self, job: str) -> float:
        """Returns when the permit that the job holds was issued."""
        permit = self._book.permit_of(job) if self._book is not None else None
        assert permit is not None, job
        return permit.granted_s

    def has_moved(self, job: str) -> bool:
        """Returns whether the job's rollout has left some of its nodes."""
        return self._book is not None and bool(self._book.freed_by(job))

    def begin_tail(self, job: str, epoch: int, keep: Sequence[int], now: float) -> str | None:
        """The rollout runs on these nodes alone. Returns why that is refused, or None. May be repeated."""
        hold, permit = self.holds.get(job), self._book.permit_of(job) if self._book is not None else None
        if hold is None or hold.epoch != epoch or permit is None or self._book is None:
            return f"{job} holds no permit of epoch {epoch}"
        if hold.phase is not Phase.ROLLOUT or not keep or not set(keep) <= set(permit.resources):
            return f"{hold.phase} holds {list(permit.resources)}: it can't keep {list(keep)}"
        self._now = now
        freed = [each for each in permit.resources if each not in keep]
        self._book.begin_tail(job, epoch, freed, now)
        return None

    def expired(self, now: float) -> list[Hold]:
        """Returns the permits whose lease has run out."""
        return [hold for hold in self.holds.values() if hold.expires_s <= now]

    def rows(self) -> tuple[OrderRow, PermitsRow]:
        """Returns what the next scheduler needs. Call `form` first."""
        assert self._book is not None and self._pace is not None and self._group is not None
        holds = [
            HoldRow(
                job=each.job,
                phase=each.phase,
                iteration=each.iteration,
                epoch=each.epoch,
                granted_s=permit.granted_s,
                ranks=list(each.until_s),
            )
            for each in self.holds.values()
            if (permit := self._book.permit_of(each.job)) is not None
        ]
        row = PermitsRow(
            clock=self._clock, at_s=self._now, holds=holds, book=self._book.state(), pace=self._pace.state()
        )
        jobs = list(self._book.order.iterations)
        return OrderRow(group=self._group, jobs=jobs, limits_s=self.limits_s()), row

    def restore(self, order: OrderRow, row: PermitsRow, now: float) -> None:
        """Restores the `rows` of an earlier scheduler, and gives every holder a whole lease.

        On another clock, the time since the rows were written is unknown and counts as none.
        """
        later_s = 0.0 if row.clock == self._clock else now - row.at_s
        self._now = now
        certificate = certify(order.group, order_by_name(order.group, order.jobs), order.limits_s)
        self._book, self._pace = self._begin(order.group, certificate, now)
        held = {each.job: (each.epoch, each.granted_s + later_s) for each in row.holds}
        self._book.restore(row.book, held, now)
        self._pace.restore(row.pace, later_s)
        for each in row.holds:
            self.holds[each.job] = Hold(
                job=each.job,
                phase=each.phase,
                iteration=each.iteration,
                epoch=each.epoch,
                until_s=dict.fromkeys(each.ranks, now + self.lease_s),
            )

    def check_integrity(self) -> None:
        """Checks that no node has two holders."""
        if self._book is not None:
            self._book.check_integrity()

    def holders_before(self, job: str) -> list[str]:
        """Returns the jobs that hold nodes that this job waits for."""
        request = self._asks.get(job)
        if request is None:
            return []
        wanted = self._resources(job, request[0])
        assert self._book is not None
        return [
            each.job
            for each in self.holds.values()
            if wanted & self._resources(each.job, each.phase) - set(self._book.freed_by(each.job))
        ]

    def _resources(self, job: str, phase: Phase) -> set[int]:
        assert self._group is not None
        if phase is Phase.TRAIN:
            return {TRAIN_POOL}
        return {node for each in self._group.members if each.job.name == job for node in each.rollout_nodes}


def _num_iterations(iterations: Sequence[str], jobs: Sequence[str]) -> int:
    """The iterations that pass until each of these jobs has had one, in this order."""
    num = 0
    for job in jobs:
        while iterations[num % len(iterations)] != job:
            num += 1
        num += 1
    return num
