"""Who holds a group's nodes, and who is next: one group's permits.

Owns: holders, epochs, leases and the queue. Promises: a node has one holder; a request gets all of its phase's
nodes at once or none; no later request overtakes an earlier one on a node they share; each grant's epoch is
higher than all before. Pure: takes ``now``. Never: sends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Hold:
    """A permit that is out."""

    job: str
    phase: str
    iteration: int
    epoch: int
    expires_s: float
    is_stopping: bool = False
    """Its lease ran out, and its process has been told to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A phase that waits."""

    job: str
    phase: str
    iteration: int


class Turns:
    """First come, first served on every node."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.holds: dict[str, Hold] = {}
        """By job: a job holds one pool at a time."""
        self._nodes: dict[str, Mapping[str, frozenset[str]]] = {}
        self._asks: list[Ask] = []
        self._epoch = 0

    def add(self, job: str, nodes: Mapping[str, frozenset[str]]) -> None:
        """A member, with the nodes of each of its phases."""
        self._nodes[job] = nodes

    def remove(self, job: str) -> None:
        """The member is gone, and what it held is free."""
        self.drop(job)
        self._nodes.pop(job, None)

    def drop(self, job: str) -> None:
        """What the job holds is free, and what it asked for is forgotten."""
        self.holds.pop(job, None)
        self._asks = [ask for ask in self._asks if ask.job != job]

    def ask(self, ask: Ask) -> None:
        """Queues a phase; again is the same as once."""
        if ask not in self._asks:
            self._asks.append(ask)

    def grant(self, now: float) -> list[Hold]:
        """The permits that may go out now."""
        busy = {node for hold in self.holds.values() for node in self._nodes[hold.job][hold.phase]}
        granted, left = [], []
        for ask in self._asks:
            nodes = self._nodes[ask.job][ask.phase]
            if busy & nodes or ask.job in self.holds:
                left.append(ask)
            else:
                granted.append(self._hold(ask, now))
            busy |= nodes
        self._asks = left
        return granted

    def _hold(self, ask: Ask, now: float) -> Hold:
        self._epoch += 1
        hold = Hold(
            job=ask.job,
            phase=ask.phase,
            iteration=ask.iteration,
            epoch=self._epoch,
            expires_s=now + self.lease_s,
        )
        self.holds[ask.job] = hold
        return hold

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

    def release(self, job: str, epoch: int) -> bool:
        """The holder is done; False if it is not the holder any more."""
        hold = self.holds.get(job)
        if hold is None or hold.epoch != epoch:
            return False
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

    def waiting_on(self, job: str) -> list[str]:
        """The jobs that hold nodes of a waiting phase."""
        wanted = {node for ask in self._asks if ask.job == job for node in self._nodes[job][ask.phase]}
        return [each.job for each in self.holds.values() if wanted & self._nodes[each.job][each.phase]]
