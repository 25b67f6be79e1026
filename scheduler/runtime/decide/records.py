"""A job's record: what the scheduler knows of the job and keeps across its own restarts, as JSON.

Owns the account of the time that the job has used, in the form that the policies read. Completed iterations
count, and the time that the present one has taken beyond its SLO. A job banks the allowed time that it did
not use. A job that used more may not be slowed at all.
"""

from enum import StrEnum
from typing import Any

import msgspec

from rose.scheduler.cluster.residents import Resident
from rose.scheduler.group.model import Job, Phase


class JobState(StrEnum):
    """A job is queued until it has a place, then running, through crashes, and then over for good."""

    QUEUED = "queued"
    HELD = "held"
    """Queued, and passed over until it is released."""
    RUNNING = "running"
    CANCELLING = "cancelling"
    """Its process has been told to end."""
    PREEMPTING = "preempting"
    """Its process has been told to end, and the job goes back to the queue when that has happened."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_waiting(self) -> bool:
        """The job has no place yet."""
        return self in (JobState.QUEUED, JobState.HELD)

    @property
    def is_placed(self) -> bool:
        """The job is a member of a group."""
        return self in (JobState.RUNNING, JobState.CANCELLING, JobState.PREEMPTING)

    @property
    def is_over(self) -> bool:
        """Nothing of the job runs any more."""
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class AskedByRanks(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks of a job have asked for and wait for. It counts when all ranks have asked."""

    phase: Phase | None
    """A permit for this phase; None: the iteration is complete."""
    iteration: int
    callers: dict[int, tuple[str, int]] = msgspec.field(default_factory=dict)
    """For each rank that has asked, its client and the number of its call. Empty in rows without ranks."""

    def __str__(self) -> str:
        what = self.phase.value if self.phase is not None else "the end"
        return f"{what} of iteration {self.iteration}"


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
    """The process has gone on, with its state in host memory; else it was restarted from a checkpoint."""
    pause_s: float | None = None
    """Time from the end of the last iteration to the first request in the new group; None before that."""
    left_s: float | None = None
    """When the pause began, on the job's `clock`; None once it has ended."""

    def describe(self) -> dict[str, Any]:
        """Returns what people are told of it."""
        return {
            "from": {"group": self.from_group, "rollout_nodes": list(self.from_nodes)},
            "to": {"group": self.to_group, "rollout_nodes": list(self.to_nodes)},
            "why": self.why,
            "iteration": self.iteration,
            "is_warm": self.is_warm,
            "pause_s": self.pause_s,
        }


class GivesWay(msgspec.Struct, frozen=True, kw_only=True):
    """The waiting job that takes a running one's place after its iteration."""

    to: str
    why: str


class PreemptionRecord(msgspec.Struct, kw_only=True):
    """One preemption of a job that has happened."""

    by: str
    by_number: int
    by_attempt: int
    """The other job's attempt at that time. If it has another attempt now, it has started since.

    -1 if it no longer waited: it was cancelled or held when this job had already been told to end.
    """
    why: str
    iteration: int
    """The first one that has not run before."""
    group: str
    waited_s: float | None = None
    """Time in the queue; None while it waits."""
    left_s: float | None = None
    """When that began, on the job's `clock`; None once it has ended."""

    def describe(self) -> dict[str, Any]:
        """Returns what people are told of it."""
        return {
            "by": self.by,
            "why": self.why,
            "iteration": self.iteration,
            "group": self.group,
            "waited_s": self.waited_s,
        }


class RunnerRow(msgspec.Struct, frozen=True, kw_only=True):
    """The runner that has the jobs' processes, as it described itself."""

    client: str
    log_folder: str
    host: str
    """local: the scheduler's own machine; ray: a Ray cluster."""
    num_nodes: dict[Phase, int] | None = None
    """The nodes that groups may use, by pool; None: unlimited, on the scheduler's own machine."""
    most_nodes: dict[Phase, int] | None = None
    """The most that there have been: the others may come back."""
    num_devices: int = 0
    """The GPUs of the scheduler's own machine, if jobs run there; 0: none, or unknown."""

    leaving: dict[str, int] = msgspec.field(default_factory=dict)
    """The attempts, by job, whose nodes are about to go away."""

    def with_nodes(self, num_nodes: dict[Phase, int] | None, most: dict[Phase, int] | None) -> "RunnerRow":
        """Returns the runner with these nodes; ``most``: those of an earlier row."""
        if num_nodes is None:
            return msgspec.structs.replace(self, num_nodes=None, most_nodes=None)
        now = {kind: num_nodes.get(kind, 0) for kind in Phase}
        ever = {kind: max(num, most[kind] if most is not None else 0) for kind, num in now.items()}
        return msgspec.structs.replace(self, num_nodes=now, most_nodes=ever)


MAX_OVERTAKEN = 16
"""Small jobs may fill what a large one leaves idle, but only so many of them."""


_MAX_METERS = 256
"""Each router has one for each of the job's keys, and those of dead routers grow no more."""


class BorrowedTime(msgspec.Struct, kw_only=True):
    """How long a job's turns have used serving GPUs."""

    gpu_s: float = 0.0
    """GPU-seconds at all routers since the job was submitted."""
    seen_s: dict[str, float] = msgspec.field(default_factory=dict)
    """What each meter said last, that which was heard last at the end. A router that restarts has a new
    meter, which counts from zero."""

    def take(self, meter: str, now_s: float) -> bool:
        """Takes in what a meter says. Returns whether that is more than before."""
        seen_s = self.seen_s.pop(meter, 0.0)
        self.seen_s[meter] = max(seen_s, now_s)
        if len(self.seen_s) > _MAX_METERS:
            del self.seen_s[next(iter(self.seen_s))]
        self.gpu_s += max(0.0, now_s - seen_s)
        return now_s > seen_s


class JobRecord(msgspec.Struct, kw_only=True):
    """One job. Its times are of `clock`: they mean nothing to a scheduler that has another one."""

    spec: dict[str, Any]
    group: str = ""
    """Its group; empty while it has never been placed."""
    rollout_nodes: tuple[int, ...] = ()
    """Their numbers in the group."""
    why: str = ""
    """Why the job was placed here, or why it still waits for a place."""
    submitted_by: str
    """Client and number of the call, so that asking again is not a second job."""
    number: int
    """Counts submissions."""
    num_overtaken: int = 0
    """The jobs that were placed before it though it was their turn only after its own."""
    state: JobState = JobState.RUNNING
    attempt: int = 0
    """0: never started."""
    host: str | None = None
    """Where its runner is; None while no runner has been heard, and in the queue."""
    places: list[str] = msgspec.field(default_factory=list)
    """Where the attempt's processes run, a line for each node, as its runner says."""
    runs: bool = False
    """Whether the attempt's processes have started, as its runner says."""
    num_ranks: int = 0
    """The processes of the attempt that enter the phases together. Right-sizing may change the next one's."""
    heard: list[int] = msgspec.field(default_factory=list)
    """The ranks of the attempt that have called a phase."""
    is_warm: bool = False
    """Whether the attempt has ended a phase."""
    is_leaving: bool = False
    """The process is ending because the job continues on other nodes."""
    num_done: int = 0
    """Iterations that are safe."""
    num_crashes: int = 0
    """Crashes since the last completed iteration."""
    num_restarts: int = 0
    note: str = ""
    """Why it is in this state."""
    released_epoch: int = 0
    """The last permit that was given back: giving it back again changes nothing."""
    waiting: AskedByRanks | None = None
    next_place: NextPlace | None = None
    """It is being moved."""
    moves: list[MoveRecord] = msgspec.field(default_factory=list)
    gives_way: GivesWay | None = None
    """It is to be preempted at the end of an iteration."""
    preemptions: list[PreemptionRecord] = msgspec.field(default_factory=list)
    placed_s: float | None = None
    """When it was placed last; None: never."""
    spent_s: float = 0.0
    """The time that completed iterations took, crashes and pauses included. See `Resident.bank_s`."""
    since_s: float | None = None
    """When the iteration that it is in began; None: the job has never been started."""
    clock: str = ""
    borrowed: BorrowedTime = msgspec.field(default_factory=BorrowedTime)

    @property
    def is_next(self) -> bool:
        """Whether so many jobs have overtaken it that it comes before all others of its priority."""
        return self.num_overtaken >= MAX_OVERTAKEN

    @property
    def is_resumed(self) -> bool:
        """Whether the job waits for a place with iterations that it has done elsewhere."""
        return self.state.is_waiting and self.num_done > 0

    def placed(self, now: float, clock: str) -> None:
        """The job leaves the queue."""
        self.placed_s, self.clock = now, clock
        last = self.preemptions[-1] if self.preemptions else None
        if last is not None and last.left_s is not None:
            last.waited_s, last.left_s = now - last.left_s, None

    def ran_s(self, now: float) -> float:
        """Returns how long ago the job was placed."""
        return now - self.placed_s if self.placed_s is not None else 0.0

    def preempted(self, by: "JobRecord", name: str, now: float) -> None:
        """The job is back in the queue, as it was when it was submitted but for what it has done.

        Its wait costs it none of the time that its SLO allows.
        """
        assert self.gives_way is not None
        if self.state is not JobState.PREEMPTING and self.since_s is not None:
            self.spent_s += now - self.since_s  # it crashed within an iteration, which runs again
        self.preemptions.append(
            PreemptionRecord(
                by=name,
                by_number=by.number,
                by_attempt=by.attempt if by.state is JobState.QUEUED else -1,
                why=self.gives_way.why,
                iteration=self.num_done,
                group=self.group,
                left_s=now,
            )
        )
        self.group, self.rollout_nodes, self.why, self.note = "", (), "", ""
        self.gives_way = self.since_s = self.placed_s = None
        self.is_leaving = False
        self.num_overtaken = 0
        for move in self.moves:
            move.left_s = None  # the pause of a move that it never ended is unknown

    def started(self, now: float, clock: str) -> None:
        """The first attempt begins."""
        if self.since_s is None:
            self.since_s, self.clock = now, clock

    def completed(self, now: float) -> None:
        """An iteration is done, and the next one begins."""
        if self.since_s is not None:
            self.spent_s += now - self.since_s
            self.since_s = now

    def adopted(self, now: float, clock: str) -> None:
        """A scheduler with this clock takes the job over. Time on another clock counts as none."""
        if self.state.is_placed and self.placed_s is None:  # a row of a version without preemption
            self.placed_s = now
        if not self.num_ranks:  # a row of a version in which all attempts had as many
            self.num_ranks = self.spec.get("num_ranks", 1)
        if self.clock == clock:
            return
        self.clock = clock
        self.since_s = now if self.since_s is not None else None
        self.placed_s = now if self.placed_s is not None else None
        for move in self.moves:
            move.left_s = now if move.left_s is not None else None
        for wait in self.preemptions:
            wait.left_s = now if wait.left_s is not None else None

    def resident(self, job: Job, *, may_move: bool, pause_s: float, now: float) -> Resident:
        """Returns the job as of ``now``. A job that is being moved has the pause of the move before it."""
        work_s = job.solo_s * max(0, job.num_iterations - self.num_done)
        bank_s = job.slo * job.solo_s * self.num_done - self.spent_s
        if self.since_s is not None:  # what crashes and missing nodes have cost is lost before it ends
            bank_s -= max(0.0, now - self.since_s - job.slo * job.solo_s)
        is_still = self.next_place is None and self.gives_way is None
        is_free = may_move and is_still and self.state is JobState.RUNNING
        found = Resident(
            job=job,
            since_s=now,
            work_s=work_s,
            bank_s=max(bank_s, -(job.slo - 1.0) * work_s),
            stays=not is_free,
        )
        return found.paused(pause_s) if self.next_place is not None else found

    def to_row(self) -> bytes:
        """Encodes the record for the channel."""
        return msgspec.json.encode(self)
