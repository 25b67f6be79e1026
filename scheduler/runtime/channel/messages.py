"""What jobs, commands, the runner and the scheduler say to each other, whatever channel carries it.

Owns: the bodies and their JSON. Promises: an unknown or malformed body raises ChannelError, and no body holds
a time: only the scheduler's own monotonic clock decides about leases, so skewed clocks change nothing.
Never: sends.
"""

from typing import Annotated, Any

import msgspec

from rose.errors import ChannelError
from rose.scheduler.cluster.model import Phase

NUM_EVENTS = 10_000
"""A channel keeps; a group of five jobs with phases of minutes makes these in a week."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", forbid_unknown_fields=True):
    """Root of all bodies. A client's ``seq`` names its call: a body may arrive again after a restart."""


class Call(Message, frozen=True, kw_only=True):
    """Root of what the scheduler is asked."""

    seq: int


class Submit(Call, frozen=True, kw_only=True):
    """A new job; ``dry_run``: only say what would happen."""

    spec: dict[str, Any]
    dry_run: bool = False


class Status(Call, frozen=True, kw_only=True):
    """One job, or all of them and their groups."""

    job: str | None = None


class Overview(Call, frozen=True, kw_only=True):
    """Everything that the dashboard shows: more than Status, and of jobs that are over only the latest."""


class History(Call, frozen=True, kw_only=True):
    """The latest events: who was granted what, and when. Their times are the scheduler host's, for people."""

    last: Annotated[int, msgspec.Meta(ge=1, le=NUM_EVENTS)]


class Cancel(Call, frozen=True, kw_only=True):
    job: str


class Drain(Call, frozen=True, kw_only=True):
    """No job starts or is placed on a node any more (``undo``: again); those on it finish."""

    group: str
    node: str
    undo: bool = False


class Hello(Call, frozen=True, kw_only=True):
    """A host's runner is there, with these attempts running.

    ``num_nodes``: what the host offers, by kind (rollout, train); None: it is the scheduler's own, and has as
    many as are asked for.
    """

    running: dict[str, int]
    log_folder: str
    host: str = "local"
    num_nodes: dict[Phase, Count] | None = None


class Alive(Call, frozen=True, kw_only=True):
    """An agent's heartbeat. A reply without a number: the scheduler doesn't know it, say Hello again."""

    host: str


class Exited(Call, frozen=True, kw_only=True):
    """A job's leader has ended, and with it all of its process group."""

    job: str
    attempt: int
    exit_status: int


class Request(Call, frozen=True, kw_only=True):
    """A phase asks for its nodes. Answered by a Granted, as soon as the group's order allows."""

    job: str
    attempt: int
    phase: Phase
    iteration: int


class Heartbeat(Call, frozen=True, kw_only=True):
    """The holder lives; without one for the lease's time the permit is taken back."""

    job: str
    attempt: int
    phase: Phase
    epoch: int


class Release(Call, frozen=True, kw_only=True):
    """The phase has offloaded its state. ``next_phase`` is queued in the same breath, on the other pool."""

    job: str
    attempt: int
    phase: Phase
    epoch: int
    next_phase: Phase | None = None
    next_iteration: int = 0


class Report(Call, frozen=True, kw_only=True):
    """Progress inside a phase: what long-tail migration looks at.

    The answer's ``keep`` names the rollout nodes onto which the rest should move, if it should.
    """

    job: str
    attempt: int
    phase: Phase
    num_done: Count
    num_total: Count
    num_tokens: Count | None = None
    """Of the longest response that runs; None: don't move them."""
    lengths: list[Count] | None = None
    """Of all responses, when all are done."""


class Moved(Call, frozen=True, kw_only=True):
    """The rollout's tail runs on these nodes alone; the others that its permit names are free."""

    job: str
    attempt: int
    epoch: int
    keep: list[int]


class Completed(Call, frozen=True, kw_only=True):
    """An iteration's state is safe: after a crash the job starts behind it.

    The answer names the job's ``group`` and ``rollout_nodes`` from here on: it may have been moved. With
    ``ends``, to another host: this process has nothing more to do.
    """

    job: str
    attempt: int
    iteration: int


class Answer(Message, frozen=True, kw_only=True):
    """The answer to one call; ``error``: why it was refused."""

    seq: int
    error: str | None = None
    body: dict[str, Any] = msgspec.field(default_factory=dict)


class Granted(Message, frozen=True, kw_only=True):
    """The permit that a request asked for. ``epoch`` fences: a later holder's is higher."""

    seq: int
    job: str
    attempt: int
    phase: Phase
    iteration: int
    epoch: int
    lease_s: float


class Start(Message, frozen=True, kw_only=True):
    """To the runner: start an attempt, behind the iterations that are done."""

    job: str
    attempt: int
    spec: dict[str, Any]
    first_iteration: int
    group: str
    rollout_nodes: list[int]


class Stop(Message, frozen=True, kw_only=True):
    """To the runner: end the process group of an attempt.

    is_lost: at once, for it does not answer. forget: its cached state as well.
    """

    job: str
    attempt: int
    is_lost: bool = False
    forget: bool = False


AnyCall = (
    Submit
    | Status
    | Overview
    | History
    | Cancel
    | Drain
    | Hello
    | Alive
    | Exited
    | Request
    | Heartbeat
    | Release
    | Report
    | Moved
    | Completed
)
SchedulerMessage = Answer | Granted | Start | Stop

_calls: msgspec.json.Decoder[AnyCall] = msgspec.json.Decoder(AnyCall)
_answers: msgspec.json.Decoder[SchedulerMessage] = msgspec.json.Decoder(SchedulerMessage)


def encode(message: Message) -> bytes:
    """One line of JSON, without its line end."""
    return msgspec.json.encode(message)


def decode_call(data: bytes) -> AnyCall:
    """What a client has sent. Raises: ChannelError."""
    try:
        return _calls.decode(data)
    except msgspec.DecodeError as error:
        raise ChannelError(f"not a call of the control channel ({error}): {data[:200]!r}") from error


def decode_scheduler_message(data: bytes) -> SchedulerMessage:
    """What the scheduler has sent. Raises: ChannelError."""
    try:
        return _answers.decode(data)
    except msgspec.DecodeError as error:
        raise ChannelError(f"not an answer of the scheduler ({error}): {data[:200]!r}") from error
