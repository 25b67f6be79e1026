"""A job's own side of the control channel: its job file, its permits and its heartbeat.

The runner writes the job file and the job's process reads it. A permit that was taken back raises PermitLost
before another phase begins.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from rose.config import Settings, launched_rank
from rose.errors import ChannelError, ConfigError, PermitLost, WorkerError
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Call,
    Completed,
    EngineRun,
    Granted,
    Heartbeat,
    Moved,
    Release,
    Report,
    Request,
    Stepped,
    StepRun,
)
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.job.cache import BoundedSet, EngineSet, HostCache, WorkingSet
from rose.scheduler.runtime.job.device_memory import wait_free
from rose.scheduler.runtime.job.multiprocessors import GreenContexts
from rose.scheduler.runtime.job.recording import Recorder, Recording
from rose.scheduler.runtime.job.share import CoreSets, SharedDevice

logger = logging.getLogger(__name__)

HEARTBEATS_A_LEASE = 5
CONNECT_TIMEOUT_S = 30.0
REPORT_S = 1.0


class JobNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the job's group, as the job's processes see it."""

    name: str
    """rollout-0, train-0"""
    address: str
    """Where processes on other nodes reach it."""
    devices: tuple[str, ...] = ()
    """The devices of the host that are the group's; empty: all of the host's, or none."""


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner tells a job's process, in the file that ROSE_JOB names."""

    channel: str
    name: str
    attempt: int
    first_iteration: int
    num_iterations: int
    group: str
    rollout_nodes: list[int]
    """Their numbers in the group when the attempt starts."""
    nodes: list[JobNode] = msgspec.field(default_factory=list)
    """Where the attempt's nodes are: rollout nodes first, then training nodes."""
    num_ranks: int = 1
    """The processes that enter the phases together."""
    cache_folder: str
    limit_bytes: dict[str, int]
    """Host memory of each phase's suspended state, of all ranks together."""
    recording: Recording | None = None
    """Where to record the phases' times under `rose sched profile`."""
    own_node: int = 0
    """Which of `nodes` this process is on."""
    shares_device: bool = False
    """Whether another pipeline computes on the same device: steps are reported, and shares taken."""
    shares_gpu: bool = False
    """Whether that device is GPU 0 of this process. A share's cores are its multiprocessors then."""

    def devices_of(self, phase: Phase) -> list[str]:
        """Returns the bound devices of the phase's nodes on this process's host."""
        here = self.nodes[self.own_node].address if self.nodes else ""
        nodes = [each for each in self.nodes if each.address == here and each.name.startswith(f"{phase}-")]
        return [device for node in nodes for device in node.devices]

    @classmethod
    def read(cls, path: Path) -> "JobFile":
        """Raises: ConfigError."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"ROSE_JOB={path}: not a job file ({error})") from error


class RunningJob:
    """This process as one rank of one attempt of a job. Phases run one at a time, in one thread."""

    def __init__(self, file: JobFile, rank: int = 0) -> None:
        self.file = file
        self.rank = rank
        self.recorder = Recorder(file.recording) if file.recording is not None else None
        channel = ChannelUrl.parse(file.channel).join(f"job:{file.name}:{file.attempt}:{rank}")
        self._client = ControlClient(channel, CONNECT_TIMEOUT_S)
        self.group, self.rollout_nodes = file.group, tuple(file.rollout_nodes)
        """Where the job runs. Both may change in `complete`."""
        self._held: Granted | None = None
        self._is_held = threading.Condition()
        self._caches: dict[str, HostCache] = {}
        device = GreenContexts() if file.shares_gpu else CoreSets()
        self.device = (
            SharedDevice(self._client.unasked, self._stepped, device) if file.shares_device else None
        )
        self._engines: EngineSet | None = None
        """Those of the phase that runs, if it shares its device."""
        self._has_warned = False
        """Whether this phase's log says that its engines' steps are not reported."""
        threading.Thread(target=self._beat, name="rose-heartbeat", daemon=True).start()

    @contextmanager
    def permit(self, phase: Phase, iteration: int) -> Iterator[None]:
        """Holds the phase's nodes inside the context, with all other ranks of the job.

        Raises: PermitLost if the permit was taken back or is refused; DeviceMemoryHeld if another job's
        process has not freed the devices.
        """
        if self._held is not None:
            raise ValueError(f"{phase} called inside of {self._held.phase}: a job holds one pool at a time")
        grant = self._client.ask(self._call(Request, phase=phase, iteration=iteration))
        if isinstance(grant, Answer):
            raise PermitLost(f"{self.file.name}: {phase} of iteration {iteration}: {grant.error}")
        self._hold(grant)
        try:
            if devices := self.file.devices_of(phase):
                wait_free(self.file.name, phase, devices)
            if self.device is not None:
                self.device.begin()
            yield
        except BaseException:
            self._release(grant)
            raise
        reply = self._release(grant)
        if reply.error is not None:
            raise PermitLost(f"{self.file.name}: {phase} of iteration {iteration}: {reply.error}")

    def step(self, num_tokens: int, num_running: int) -> None:
        """Reports a step of the phase that runs, and waits while the other pipeline has the device."""
        if self.device is not None and self._held is not None:
            self.device.step(num_tokens, num_running)

    @contextmanager
    def sharing(self, working_set: WorkingSet | None) -> Iterator[None]:
        """Tells a loaded working set the job's share of the device's memory, and each new one, inside the
        context. There its engines' steps are reported."""
        outer = self._engines
        with ExitStack() as stack:
            if self.device is not None and isinstance(working_set, BoundedSet):
                stack.enter_context(self.device.bounding(working_set.take_memory))
            if self.device is not None and isinstance(working_set, EngineSet):
                self._engines, self._has_warned = working_set, False
                self._engine_runs()  # what they computed before does not count
            try:
                yield
            finally:
                self._engines = outer

    def _stepped(self, steps: list[StepRun], epoch: int) -> None:
        self._client.tell(self._call(Stepped, steps=steps, epoch=epoch))

    def _hold(self, grant: Granted | None) -> None:
        with self._is_held:
            self._held = grant
            self._is_held.notify()

    def _release(self, grant: Granted) -> Answer:
        if self.device is not None:
            self.device.end()
        self._hold(None)
        reply = self._client.ask(self._call(Release, phase=grant.phase, epoch=grant.epoch))
        assert isinstance(reply, Answer), reply
        return reply

    def complete(self, iteration: int) -> None:
        """Records that the iteration's state is safe: the next attempt starts after it. Waits for all ranks.

        The job may be in another group from here on: its next phases load their states on that group's nodes.
        Raises: SystemExit if that group is on another host; PermitLost if this attempt has been replaced.
        """
        reply = self._client.ask(self._call(Completed, iteration=iteration))
        assert isinstance(reply, Answer), reply
        if reply.error is not None:
            raise PermitLost(f"{self.file.name}: iteration {iteration} is not recorded: {reply.error}")
        group, nodes = reply.body["group"], tuple(reply.body["rollout_nodes"])
        if (group, nodes) != (self.group, self.rollout_nodes):
            logger.info("moved from=%s%s to=%s%s", self.group, self.rollout_nodes, group, nodes)
            self.group, self.rollout_nodes = group, nodes
        if reply.body["ends"]:
            raise SystemExit(0)

    def report(
        self,
        phase: Phase,
        num_done: int,
        num_total: int,
        num_tokens: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> tuple[int, ...] | None:
        """Reports progress inside a phase. Returns the nodes onto which the rest should move, or None.

        Waits at most `REPORT_S` for the engines' steps, and as long for the scheduler: without them the phase
        goes on.
        """
        call = self._call(
            Report,
            phase=phase,
            num_done=num_done,
            num_total=num_total,
            num_tokens=num_tokens,
            lengths=list(lengths) if lengths is not None else None,
            engines=self._engine_runs(),
        )
        try:
            reply = self._client.ask(call, REPORT_S)
        except ChannelError as error:
            logger.info("not reported phase=%s num_done=%d reason=%s", phase, num_done, error)
            return None
        assert isinstance(reply, Answer), reply
        keep = reply.body.get("keep")
        return tuple(keep) if keep is not None else None

    def _engine_runs(self) -> list[EngineRun]:
        try:
            return self._engines.engine_runs() if self._engines is not None else []
        except WorkerError as error:
            if not self._has_warned:
                logger.warning(
                    "this phase's tail may stay where it is: an engine's steps are unknown: %s", error
                )
            self._has_warned = True
            return []

    def moved(self, keep: Sequence[int]) -> None:
        """Reports that the rollout runs on these of its nodes alone. Raises: PermitLost."""
        held = self._held
        if held is None:
            raise ValueError("no phase runs that could have moved")
        reply = self._client.ask(self._call(Moved, epoch=held.epoch, keep=list(keep)))
        assert isinstance(reply, Answer), reply
        if reply.error is not None:
            raise PermitLost(f"{self.file.name}: the rollout's tail: {reply.error}")

    def _call(self, kind: Callable[..., Call], **fields: Any) -> Call:
        """Returns a new call of this rank of this attempt."""
        mine = {"job": self.file.name, "attempt": self.file.attempt, "rank": self.rank}
        return kind(seq=self._client.next_seq(), **mine, **fields)

    def cache(self, phase: str) -> HostCache:
        """Returns this rank's state of the phase in host memory: one object for all iterations."""
        if phase not in self._caches:
            self._caches[phase] = HostCache(
                Path(self.file.cache_folder) / phase,
                self.file.limit_bytes.get(phase, 0),
                f"{phase} of job {self.file.name}",
                self.rank,
            )
        return self._caches[phase]

    def _beat(self) -> None:
        while True:
            with self._is_held:
                self._is_held.wait_for(lambda: self._held is not None)
                held = self._held
            assert held is not None
            self._client.tell(self._call(Heartbeat, phase=held.phase, epoch=held.epoch))
            time.sleep(held.lease_s / HEARTBEATS_A_LEASE)


@cache
def running_job() -> RunningJob | None:
    """Returns this process's job; None if no runner has started the process. Raises: ConfigError."""
    path = Settings.from_environment().job_file
    if path is None:
        return None
    file = JobFile.read(path)
    return RunningJob(file, _rank(file, launched_rank()))


def _rank(file: JobFile, launched: tuple[int, int] | None) -> int:
    """Returns this process's rank. Raises: ConfigError if the launcher and the job's file disagree."""
    rank, num_ranks = launched if launched is not None else (0, 1)
    if num_ranks == file.num_ranks:
        return rank
    said = f"job {file.name}: its file says num_ranks: {file.num_ranks}, "
    if launched is None:
        raise ConfigError(
            f"{said}and this process has no RANK and WORLD_SIZE in its environment; start it with "
            f"torchrun --nproc-per-node {file.num_ranks}, or set num_ranks: 1"
        )
    raise ConfigError(
        f"{said}WORLD_SIZE is {num_ranks}; set num_ranks: {num_ranks} in it, or start as many processes as "
        "it says"
    )
