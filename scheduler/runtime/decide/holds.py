"""The permits that jobs hold in a group, and the rows from which the next scheduler restores them."""

from dataclasses import dataclass

import msgspec

from rose.scheduler.cluster.model import Group, Phase
from rose.scheduler.group.line import BookState
from rose.scheduler.group.pace import PaceState


@dataclass(slots=True, kw_only=True)
class Hold:
    """A permit that is out."""

    job: str
    phase: Phase
    iteration: int
    epoch: int
    expires_s: float
    is_stopping: bool = False
    """The lease has run out, and the holder's process has been told to end."""


class HoldRow(msgspec.Struct, kw_only=True):
    """A permit that is out, for the next scheduler."""

    job: str
    phase: Phase
    iteration: int
    epoch: int
    granted_s: float


class PermitsRow(msgspec.Struct, kw_only=True):
    """What changes with every permit. Times are of ``clock``; ``at_s`` is the latest of them."""

    clock: str
    at_s: float
    holds: list[HoldRow]
    book: BookState
    pace: PaceState


class OrderRow(msgspec.Struct, kw_only=True):
    """What changes when a job joins: the certified group, and its jobs in their cyclic order."""

    group: Group
    jobs: list[str]
    limits_s: dict[str, float] = msgspec.field(default_factory=dict)
    """What the certificate allows each job."""
