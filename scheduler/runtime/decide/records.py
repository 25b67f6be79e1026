"""What the scheduler knows of a job, and what it keeps of it across its own restarts.

Owns: the record and its JSON. Promises: a record that was written can be read by the next scheduler.
Never: decides.
"""

from enum import StrEnum
from typing import Any

import msgspec

from rose.scheduler.cluster.model import Phase


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


class PermitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that no permit answers yet."""

    phase: Phase
    iteration: int
    client: str
    seq: int
    """0: the release of the phase before queued it, and nobody waits for an answer yet."""


class NextPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a running job goes at its next boundary between two iterations; it is a member there already."""

    group: str
    rollout_nodes: tuple[int, ...]
    why: str


class MoveRecord(msgspec.Struct, kw_only=True):
    """One move of a running job that has happened."""

    from_group: str
    from_nodes: tuple[int, ...]
    to_group: str
    to_nodes: tuple[int, ...]
    why: str
    iteration: int
    """The first one that runs there."""
    is_warm: bool
    """The process has gone on, with its state in host memory; else it was started anew from a checkpoint."""
    pause_s: float | None = None
    """From the end of the iteration before to the first request there; None: that has not come yet."""
    left_s: float | None = None
    """When the pause began, until it ends; of the job's `clock`."""


class JobRecord(msgspec.Struct, kw_only=True):
    """One job. Its times are of `clock`: they mean nothing to a scheduler that has another one."""

    spec: dict[str, Any]
    group: str
    rollout_nodes: tuple[int, ...]
    """In the group."""
    why: str
    """Of the candidate."""
    submitted_by: str
    """Client and number of the call, so that asking again is not a second job."""
    number: int
    """In the order of submission."""
    state: JobState = JobState.RUNNING
    attempt: int = 0
    """0: never started."""
    host: str | None = None
    """Whose runner has its process; None: nobody's, it waits for nodes."""
    is_leaving: bool = False
    """Its process ends, for the job goes on on another host."""
    num_done: int = 0
    """Iterations that are safe."""
    num_crashes: int = 0
    """Since the last iteration that was completed."""
    num_restarts: int = 0
    note: str = ""
    """Why it is in this state."""
    released_epoch: int = 0
    """The last permit that was given back: giving it back again changes nothing."""
    waiting: PermitRequest | None = None
    next_place: NextPlace | None = None
    """It is being moved."""
    moves: list[MoveRecord] = msgspec.field(default_factory=list)
    spent_s: float = 0.0
    """What completed iterations have taken, crashes and pauses included: see Resident's bank."""
    since_s: float | None = None
    """When the iteration that it is in began; None: the job has never been started."""
    clock: str = ""

    def to_row(self) -> bytes:
        """For the channel."""
        return msgspec.json.encode(self)

    @classmethod
    def from_row(cls, row: bytes) -> "JobRecord":
        """What `to_row` gave."""
        return msgspec.json.decode(row, type=cls)
