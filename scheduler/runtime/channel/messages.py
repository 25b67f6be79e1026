"""The messages between jobs, commands, runners and the scheduler, as JSON.

An unknown or malformed body raises ChannelError. No body holds a point in time: only the scheduler's own
monotonic clock decides about leases, so clocks that differ between hosts change nothing.
"""

from typing import Annotated, Any

import msgspec

from rose.errors import ChannelError
from rose.scheduler.group.model import Phase

NUM_EVENTS = 10_000
"""The events that a channel keeps: a week of a group of five jobs with phases of minutes."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", forbid_unknown_fields=True):
    """Root of all bodies. A client's ``seq`` identifies its call, which may arrive again after a restart."""


class Call(Message, frozen=True, kw_only=True):
    """Root of all calls to the scheduler."""

    seq: int


class Submit(Call, frozen=True, kw_only=True):
    """Submits a job; ``dry_run`` only asks what would happen."""

    spec: dict[str, Any]
    dry_run: bool = False


class Status(Call, frozen=True, kw_only=True):
    """Asks for one job, or for all jobs and their groups."""

    job: str | None = None


class Overview(Call, frozen=True, kw_only=True):
    """Asks for what the dashboard shows: more than Status, but only the latest ended jobs."""


class History(Call, frozen=True, kw_only=True):
    """Asks for the latest events. Their times are wall-clock times of the scheduler's host, for people."""

    last: Annotated[int, msgspec.Meta(ge=1, le=NUM_EVENTS)]


class Cancel(Call, frozen=True, kw_only=True):
    job: str


class HoldJob(Call, frozen=True, kw_only=True):
    """Keeps a queued job from starting until it is released."""

    job: str


class ReleaseJob(Call, frozen=True, kw_only=True):
    """Puts a held job back where it was in the queue."""

    job: str


class Drain(Call, frozen=True, kw_only=True):
    """Places no more jobs on a node, or does again (``undo``). The jobs on it run to their ends."""

    group: str
    node: str
    undo: bool = False


class Hello(Call, frozen=True, kw_only=True):
    """The runner has connected, with these attempts running.

    ``host``: where it runs jobs. ``num_nodes``: the nodes there, by pool; None: unlimited, on this machine,
    which has ``num_devices`` GPUs; 0: none, or unknown.
    """

    running: dict[str, int]
    log_folder: str
    host: str = "local"
    num_nodes: dict[Phase, Count] | None = None
    num_devices: Count = 0


class Awaiting(Call, frozen=True, kw_only=True):
    """The runner can't start jobs yet. ``what``: it waits for this, for people."""

    what: str


class Nodes(Call, frozen=True, kw_only=True):
    """The number of nodes that the runner can give to groups has changed, by pool.

    leaving: the attempts, by job, that use nodes which are about to go away. They end after their iteration
    and continue on other nodes.
    """

    num_nodes: dict[Phase, Count]
    leaving: dict[str, int] = msgspec.field(default_factory=dict)


class Placed(Call, frozen=True, kw_only=True):
    """Says where an attempt's processes run, or why they don't run yet, for people."""

    job: str
    attempt: int
    places: list[str]
    """One line a node."""
    runs: bool
    """Whether its processes have started."""


class Exited(Call, frozen=True, kw_only=True):
    """A job's leader has ended, and with it all of its process group."""

    job: str
    attempt: int
    exit_status: int
    cannot_start: str | None = None
    """Why the command never ran and never will, e.g. that there is no such program."""
    lost: str | None = None
    """Which node has taken the processes with it. It counts as no crash."""
    why: str | None = None
    """What is known of a crash beyond its status."""


class RankCall(Call, frozen=True, kw_only=True):
    """Root of the calls of a job's processes. A job has `num_ranks` of them, numbered from 0."""

    job: str
    attempt: int
    rank: Count = 0


class Request(RankCall, frozen=True, kw_only=True):
    """A phase asks for its nodes: all ranks do.

    Each is answered by a Granted, when all have asked and as soon as the group's order allows.
    """

    phase: Phase
    iteration: int


class Heartbeat(RankCall, frozen=True, kw_only=True):
    """The holder is alive. A permit is taken back if one of the ranks that hold it is silent for a lease."""

    phase: Phase
    epoch: int


class Release(RankCall, frozen=True, kw_only=True):
    """The phase has offloaded its state. The nodes are free when all ranks have released them."""

    phase: Phase
    epoch: int


class EngineRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engines of one rollout node have computed since the last report, and what they have now."""

    num_steps: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    """In steps."""
    tokens: Count
    """Computed ones, prefilled tokens included."""
    generated: Count
    num_requests: Count
    """Those that run or wait there now."""


class Report(RankCall, frozen=True, kw_only=True, omit_defaults=True):
    """Reports progress inside a phase, for long-tail migration. Rank 0 reports for all.

    Defaults are left out, so that a scheduler of an earlier version takes it.
    The answer's ``keep`` names the rollout nodes onto which the rest should move, if it should move.
    """

    phase: Phase
    num_done: Count
    num_total: Count
    num_tokens: Count | None = None
    """The length of the longest response that still runs; None if the tail must not move."""
    lengths: list[Count] | None = None
    """The lengths of all responses, when all are done."""
    engines: list[EngineRun] = msgspec.field(default_factory=list)
    """Of each rollout node, where the job shares its device and knows its engines."""


class Moved(RankCall, frozen=True, kw_only=True):
    """The rollout's tail runs on these nodes alone; the permit's other nodes are free."""

    epoch: int
    keep: list[int]


class Completed(RankCall, frozen=True, kw_only=True):
    """An iteration's state is safe: after a crash the job starts after it. Answered when all ranks say so.

    The answer names the job's ``group`` and ``rollout_nodes`` from here on, as the job may have been moved.
    ``ends``: it continues on other nodes, and this process must end.
    """

    iteration: int


class StepRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One forward step or microbatch. ``epoch``: of the share under which it began."""

    tokens: Count
    num_running: Count = 0
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    epoch: int


class Stepped(RankCall, frozen=True, kw_only=True):
    """The steps of a phase since the last report. The job obeys the share of ``epoch`` from now on."""

    steps: list[StepRun]
    epoch: int


class Answer(Message, frozen=True, kw_only=True):
    """Answers one call; ``error`` says why it was refused."""

    seq: int
    error: str | None = None
    body: dict[str, Any] = msgspec.field(default_factory=dict)


class Granted(Message, frozen=True, kw_only=True):
    """The permit that all ranks have asked for. A later one has a higher ``epoch``, which fences this one."""

    seq: int
    job: str
    attempt: int
    phase: Phase
    iteration: int
    epoch: int
    lease_s: float


class Shared(Message, frozen=True, kw_only=True):
    """A job's part of the device that it shares with another. Without ``cores`` it pauses at its next step.

    ``cores``: of the device; on a GPU its multiprocessors. ``compute``, ``memory``: shares of the whole.
    """

    epoch: int
    cores: list[Count]
    compute: float
    memory: float


class Start(Message, frozen=True, kw_only=True):
    """Tells a runner to start an attempt after the completed iterations."""

    job: str
    attempt: int
    spec: dict[str, Any]
    first_iteration: int
    group: str
    rollout_nodes: list[int]
    num_train_nodes: int = 1
    """Those of the group: its jobs train on all of them."""
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    """Environment variables of the job's processes."""


class Stop(Message, frozen=True, kw_only=True):
    """Tells a runner to end the process group of an attempt.

    is_lost: kill it at once, because it does not answer. forget: remove its cached state as well.
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
    | HoldJob
    | ReleaseJob
    | Drain
    | Hello
    | Awaiting
    | Nodes
    | Placed
    | Exited
    | Request
    | Heartbeat
    | Release
    | Report
    | Moved
    | Completed
    | Stepped
)
SchedulerMessage = Answer | Granted | Shared | Start | Stop

_calls: msgspec.json.Decoder[AnyCall] = msgspec.json.Decoder(AnyCall)
_answers: msgspec.json.Decoder[SchedulerMessage] = msgspec.json.Decoder(SchedulerMessage)


def encode(message: Message) -> bytes:
    """Returns one line of JSON, without its line end."""
    return msgspec.json.encode(message)


def decode_call(data: bytes) -> AnyCall:
    """Decodes what a client has sent. Raises: ChannelError."""
    try:
        return _calls.decode(data)
    except msgspec.DecodeError as error:
        raise ChannelError(f"not a call of the control channel ({error}): {data[:200]!r}") from error


def decode_scheduler_message(data: bytes) -> SchedulerMessage:
    """Decodes what the scheduler has sent. Raises: ChannelError."""
    try:
        return _answers.decode(data)
    except msgspec.DecodeError as error:
        raise ChannelError(f"not a message of the scheduler ({error}): {data[:200]!r}") from error
