"""The permits that jobs hold in a group, and the rows from which the next scheduler restores them."""

from dataclasses import dataclass

import msgspec

from rose.scheduler.group.line import BookState
from rose.scheduler.group.model import Group, Phase
from rose.scheduler.group.pace import PaceState


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
        """When the first lease ends."""
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
    """What changes with every permit. Times are of ``clock``; ``at_s`` is the latest of them."""

    clock: str
    at_s: float
    holds: list[HoldRow]
    book: BookState
    pace: PaceState


class OrderRow(msgspec.Struct, kw_only=True):
    """What changes when a job joins: the certified group, and the job of each iteration in a pass."""

    group: Group
    jobs: list[str]
    limits_s: dict[str, float] = msgspec.field(default_factory=dict)
    """What the certificate allows each job."""
