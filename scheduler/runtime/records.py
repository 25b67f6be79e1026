"""What the scheduler knows of a job, and what it keeps of it across its own restarts.

Owns: the record and its JSON. Promises: a record that was written can be read by the next scheduler.
Never: decides.
"""

from enum import StrEnum
from typing import Any

import msgspec


class JobState(StrEnum):
    """A job's way: running (from its submission on, through crashes), then one of the others for good."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    """Its process has been told to end."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """Nothing of the job runs any more."""
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class JobRecord(msgspec.Struct, kw_only=True):
    """One job. Times are left out: they would mean nothing to the next scheduler."""

    spec: dict[str, Any]
    group: str
    rollout_nodes: tuple[int, ...]
    """In the group."""
    why: str
    """Of the placement."""
    submitted_by: str
    """Client and number of the call, so that asking again is not a second job."""
    number: int
    """In the order of submission."""
    state: JobState = JobState.RUNNING
    attempt: int = 0
    """0: never started."""
    num_done: int = 0
    """Iterations that are safe."""
    num_crashes: int = 0
    """Since the last iteration that was completed."""
    num_restarts: int = 0
    note: str = ""
    """Why it is in this state."""
    released_epoch: int = 0
    """The last permit that was given back: giving it back again changes nothing."""
    waiting: dict[str, Any] | None = None
    """The request that has no grant yet: phase, iteration, client, seq."""

    def to_row(self) -> bytes:
        """For the channel."""
        return msgspec.json.encode(self)

    @classmethod
    def from_row(cls, row: bytes) -> "JobRecord":
        """What `to_row` gave."""
        return msgspec.json.decode(row, type=cls)
