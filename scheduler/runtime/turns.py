"""Who holds a group's nodes, and who is next: one group's permits, across joins and restarts.

Owns: the group's permit book, what is held and asked for as jobs see it (iteration, epoch), and the leases.
Promises: grants follow the certified order of the book; a job that joins, and a new scheduler, take the
permits over that are out; each grant's epoch is higher than all before. Pure: takes ``now``. Never: sends.

The book is made anew when a job joins, and after a restart: in an order in which what is held now is held in
turn. A job that leaves keeps an empty turn until then (removing one can slow others). Leases are watched here
and not by the book, which gives a dead holder's nodes on at once: here its process is ended first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rose.scheduler.cluster.model import Group
from rose.scheduler.group.order import TRAIN_POOL, CyclicOrder, PhaseKind, order_of
from rose.scheduler.group.permits import PermitBook


@dataclass(slots=True, kw_only=True)
class Hold:
    """A permit that is out."""

    job: str
    phase: str
    iteration: int
    epoch: int
    expires_s: float
    book_epoch: int = 0
    """The book's own, which begins anew with each book."""
    is_stopping: bool = False
    """Its lease ran out, and its process has been told to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A phase that waits."""

    job: str
    phase: str
    iteration: int


class Turns:
    """One group. Before `form` it has no members."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.holds: dict[str, Hold] = {}
        """By job: a job holds one pool at a time."""
        self._asks: dict[str, Ask] = {}
        self._epoch = 0
        self._nodes: dict[str, tuple[int, ...]] = {}
        self._book: PermitBook | None = None
        self._order: CyclicOrder | None = None

    def order_for(self, group: Group) -> CyclicOrder:
        """Every member once, those first whose phases end first: what is held now is then held in turn."""
        names = [member.job.name for member in group.members]
        return order_of(group, sorted(range(len(names)), key=lambda index: (self._rank(names[index]), index)))

    def _rank(self, job: str) -> int:
        hold, ask = self.holds.get(job), self._asks.get(job)
        if hold is not None:
            return 0 if hold.phase == PhaseKind.TRAIN else 2
        return 1 if ask is not None and ask.phase == PhaseKind.TRAIN else 3

    @property
    def order_of_jobs(self) -> list[str]:
        """The jobs as they take turns, those that left included until the next one joins."""
        return list(self._order.steps_of_job) if self._order is not None else []

    def form(self, group: Group, now: float) -> None:
        """Takes the group's members in `order_for`; permits that are out stay so."""
        self._order = self.order_for(group)
        self._book = book = PermitBook(self._order, lease_s=self.lease_s)
        self._nodes = {member.job.name: member.rollout_nodes for member in group.members}
        for hold in self.holds.values():
            book.request(hold.job, PhaseKind(hold.phase), now)
        permits = {permit.job: permit for permit in book.advance(now)}
        for hold in self.holds.values():
            hold.book_epoch = permits[hold.job].epoch
        for ask in self._asks.values():
            book.request(ask.job, PhaseKind(ask.phase), now)

    def drop(self, job: str, now: float) -> None:
        """What the job holds is free, and what it asked for is forgotten; its turn is passed over."""
        self.holds.pop(job, None)
        self._asks.pop(job, None)
        if self._book is not None and job in self._nodes:
            self._book.leave(job, now)

    def ask(self, ask: Ask) -> None:
        """Queues a phase; again is the same as once."""
        self._asks[ask.job] = ask

    def grant(self, now: float) -> list[Hold]:
        """The permits that go out now. To be called after each change, and from time to time."""
        book = self._book
        if book is None:
            return []
        for hold in self.holds.values():
            book.heartbeat(hold.job, hold.book_epoch, now)
        for ask in self._asks.values():
            book.request(ask.job, PhaseKind(ask.phase), now)
        granted = []
        for permit in book.advance(now):
            self._epoch += 1
            ask = self._asks.pop(permit.job)
            hold = Hold(
                job=ask.job,
                phase=ask.phase,
                iteration=ask.iteration,
                epoch=self._epoch,
                expires_s=now + self.lease_s,
                book_epoch=permit.epoch,
            )
            self.holds[ask.job] = hold
            granted.append(hold)
        return granted

    def beat(self, job: str, epoch: int, now: float) -> bool:
        """A heartbeat; False if another permit is out, or none."""
        hold = self.holds.get(job)
        if hold is None or hold.epoch != epoch:
            return False
        if not hold.is_stopping:
            hold.expires_s = now + self.lease_s
        return True

    def renew(self, now: float) -> None:
        """A whole lease for every holder: nobody could be heard for a while."""
        for hold in self.holds.values():
            hold.expires_s = now + self.lease_s

    def release(self, job: str, epoch: int, now: float) -> bool:
        """The holder is done; False if it is not the holder any more."""
        hold = self.holds.get(job)
        if hold is None or hold.epoch != epoch:
            return False
        assert self._book is not None
        self._book.release(job, hold.book_epoch, now)
        del self.holds[job]
        return True

    def expired(self, now: float) -> list[Hold]:
        """Permits whose lease has run out."""
        return [hold for hold in self.holds.values() if hold.expires_s <= now]

    def to_json(self) -> dict[str, Any]:
        """What the next scheduler needs: holders and the last epoch, no times."""
        return {
            "epoch": self._epoch,
            "holds": [[each.job, each.phase, each.iteration, each.epoch] for each in self.holds.values()],
        }

    def restore(self, state: Mapping[str, Any], now: float) -> None:
        """From `to_json` of an earlier scheduler; every holder gets a whole lease to be heard of again."""
        self._epoch = state["epoch"]
        for job, phase, iteration, epoch in state["holds"]:
            self.holds[job] = Hold(
                job=job, phase=phase, iteration=iteration, epoch=epoch, expires_s=now + self.lease_s
            )

    def holders_before(self, job: str) -> list[str]:
        """The jobs that hold nodes of a waiting phase."""
        ask = self._asks.get(job)
        if ask is None:
            return []
        wanted = self._resources(job, ask.phase)
        return [each.job for each in self.holds.values() if wanted & self._resources(each.job, each.phase)]

    def _resources(self, job: str, phase: str) -> set[int]:
        return {TRAIN_POOL} if phase == PhaseKind.TRAIN else set(self._nodes[job])
