"""A job's record: what the scheduler knows of the job and keeps across its own restarts, as JSON."""

from enum import StrEnum
from typing import Any

import msgspec

from rose.scheduler.cluster.model import Phase


class JobState(StrEnum):
    """A job is running from its submission on, through crashes, and then one of the others for good."""

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
    """The place to which a running job moves after its iteration. The job is a member there already."""

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
    """Time from the end of the last iteration to the first request in the new group; None before that."""
    left_s: float | None = None
    """When the pause began, on the job's `clock`; None once it has ended."""


class JobRecord(msgspec.Struct, kw_only=True):
    """One job. Its times are of `clock`: they mean nothing to a scheduler that has another one."""

    spec: dict[str, Any]
    group: str
    rollout_nodes: tuple[int, ...]
    """Their numbers in the group."""
    why: str
    """Why the job was placed here."""
    submitted_by: str
    """Client and number of the call, so that asking again is not a second job."""
    number: int
    """Counts submissions."""
    state: JobState = JobState.RUNNING
    attempt: int = 0
    """0: never started."""
    host: str | None = None
    """The host whose runner has the job's process; None while the job waits for nodes."""
    is_leaving: bool = False
    """The process is ending because the job continues on another host."""
    num_done: int = 0
    """Iterations that are safe."""
    num_crashes: int = 0
    """Crashes since the last completed iteration."""
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
    """The time that completed iterations took, crashes and pauses included. See `Resident.bank_s`."""
    since_s: float | None = None
    """When the iteration that it is in began; None: the job has never been started."""
    clock: str = ""

    def to_row(self) -> bytes:
        """Encodes the record for the channel."""
        return msgspec.json.encode(self)

    @classmethod
    def from_row(cls, row: bytes) -> "JobRecord":
        """Decodes a row of `to_row`."""
        return msgspec.json.decode(row, type=cls)
