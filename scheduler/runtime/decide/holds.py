"""What jobs hold and ask for in a group, and the rows from which the next scheduler has its turns again.

Owns: these values. Promises: a row that was written can be read by the next scheduler. Never: decides.
"""

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
    """Its lease ran out, and its process has been told to end."""


class HoldRow(msgspec.Struct, kw_only=True):
    """A permit that is out, for the next scheduler."""

    job: str
    phase: Phase
    iteration: int
    epoch: int
    granted_s: float


class PermitsRow(msgspec.Struct, kw_only=True):
    """What changes with every grant. Times are of ``clock``; ``at_s`` is the last one before the row."""

    clock: str
    at_s: float
    holds: list[HoldRow]
    book: BookState
    pace: PaceState


class OrderRow(msgspec.Struct, kw_only=True):
    """What changes when a job joins: the group as it was certified, and its members in their order."""

    group: Group
    jobs: list[str]
