"""The actors of a job on Ray: one keeps a node's devices for its group, one runs an attempt's part of a node.

A group's jobs share the devices of its nodes, which Ray gives to one actor alone: the keeper, which takes the
whole bundle. The parts of the jobs' attempts are beside it in the bundle, and take nothing. Both go on when
their scheduler ends, and the next one finds them by their names (adopt.py).
"""

import contextlib
import fcntl
import io
import os
import sys
import threading
import time
import zipfile
from pathlib import Path

import msgspec
import ray

from rose.config import Settings, forget_variables, parse_config, search_path
from rose.jobs.on_ray.leftovers import VARIABLE, end_leftovers, identity, is_alive
from rose.jobs.on_ray.measured import FILE, Measured, measured
from rose.jobs.ranks import (
    Ended,
    HostPart,
    LocalAttempt,
    argv_of,
    own_bytes,
    remove,
    start_here,
    write_job_file,
)
from rose.ports import free_port
from rose.scheduler.runtime.channel.messages import Start
from rose.scheduler.runtime.job.job import JobNode
from rose.scheduler.runtime.job.recording import Recording
from rose.scheduler.runtime.job.spec import Launch, RunSpec

MAX_OUTPUT_BYTES = 1 << 20
MARK = "part"
"""The file in a part's folder that has the part's identity."""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray node of a bundle, and its devices there."""

    ray_node: str
    address: str
    devices: tuple[str, ...]


class Keeper:
    """Holds the resources of a bundle as long as its group uses them."""

    def where(self) -> Where:
        context = ray.get_runtime_context()
        return Where(
            ray_node=context.get_node_id(),
            address=str(ray.util.get_node_ip_address()),
            devices=tuple(context.get_accelerator_ids().get("GPU", ())),
        )


class Owner:
    """Holds the name by which one scheduler owns a Ray cluster."""

    def __init__(self, who: str) -> None:
        self._who = who

    def who(self) -> str:
        return self._who


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A part that is ready to start its processes."""

    identity: str
    """Names the actor, for `end_leftovers`."""
    free_port: int


class Polled(msgspec.Struct, frozen=True, kw_only=True):
    """What a part has to tell."""

    ended: Ended | None
    output: bytes
    """The lines that its processes have written and nobody has kept yet."""
    end: int
    """The end of these lines, for the next poll."""


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A part whose processes were started, as the next scheduler needs to know it."""

    order: Start
    part: HostPart
    ray_nodes: tuple[str, ...]
    """The Ray node of each of the attempt's nodes."""
    identity: str
    pids: list[int]
    """The process ids of its ranks."""


def folders(root: str, name: str = "") -> tuple[Path, Path]:
    """Returns this host's folders of a job's files and of its host memory; without a name, of all jobs."""
    settings = Settings.from_environment()
    files = settings.make_runtime_dir() / "ray-jobs" / root / name
    return files, settings.staging_root / "jobs" / root / name


def sweep(dead: tuple[str, ...], root: str, name: str = "") -> list[int]:
    """Ends what dead actors have left here, then frees the folders. Returns the pids that still run.

    name: a job, of which no part may go on here; one that hangs may never have told its identity.
    """
    if name:
        with contextlib.suppress(FileNotFoundError):  # a part frees its own folder meanwhile
            dead = (*dead, *_identities(folders(root, name)[0]))
    if not (left := end_leftovers(dead)):
        remove(*folders(root, name))
    return left


def remove_stale(files: Path) -> None:
    """Frees the files and the host memory of jobs of which no part runs here any more.

    files: the folder that has one folder for each scheduler's channel.
    """
    for job in files.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # a part frees its own folder meanwhile
            if not any(map(is_alive, _identities(job))):
                remove(*folders(job.parent.name, job.name))


def _identities(job: Path) -> list[str]:
    """Returns the identities of the parts that have folders in the job's. Raises: FileNotFoundError."""
    return [mark.read_text() for mark in job.glob(f"*/{MARK}")]


class Part:
    """The processes of one attempt on one node. They end with this actor."""

    def __init__(self, name: str, node: str, root: str) -> None:
        """name: the job's. node: its node, such as rollout-0. root: names the scheduler's channel."""
        folder, self._cache = folders(root, name)
        self._folder = folder / node
        self._log = self._folder / "output.log"
        self._kept = 0
        """The end of the output that is in the job's log."""
        self._attempt: LocalAttempt | None = None
        self._lock = threading.Lock()
        """Held while processes are started or killed: what is killed starts none afterwards."""
        self._is_killed = False
        self._begun: tuple[Start, HostPart, tuple[str, ...]] | None = None

    def prepare(self, code: bytes | None) -> Prepared:
        """Ends what earlier attempts have left on this host, and unpacks the job's code."""
        if left := end_leftovers():
            raise RuntimeError(f"processes {left} of an earlier attempt do not end")
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = self._folder.parents[2]
        with (files / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a folder without a mark would count as left
            remove_stale(files)
            # What an earlier attempt left may be ahead of the last completed iteration: this one starts cold.
            remove(self._cache, self._folder)
            self._folder.mkdir(mode=0o700, parents=True)
            (self._folder / MARK).write_text(identity(os.getpid()))
        if code is not None:
            with zipfile.ZipFile(io.BytesIO(code)) as archive:
                archive.extractall(self._folder / "code")
        return Prepared(identity=identity(os.getpid()), free_port=free_port())

    def start(
        self,
        order: Start,
        part: HostPart,
        ray_nodes: tuple[str, ...],
        channel: str,
        recording: Recording | None = None,
    ) -> None:
        """Starts the processes. ray_nodes: those of the attempt's nodes. Raises: ConfigError.

        recording: of a job that is run for its profile; each part records into a file of its own.
        """
        spec = parse_config(order.spec, RunSpec, f"job {order.job}")
        if spec.runtime_env.get("working_dir") is not None:
            sent = self._folder / "code"
            spec = spec.model_copy(update={"folder": str(sent if sent.exists() else Path.cwd())})
        if recording is not None:
            recording = msgspec.structs.replace(recording, path=str(self._folder / FILE))
        file = write_job_file(
            self._folder / "job.json",
            spec,
            order,
            channel=channel,
            cache=self._cache,
            nodes=part.nodes,
            kept_here=_kept_here(spec, part),
            own_node=part.index,
            recording=recording,
        )
        # Ray's own Python may be that of a `pip` environment; `python` in the command is the same.
        path = search_path(Path(sys.executable).parent)
        forget_variables("RAY_")  # a program that starts a Ray of its own must not find this one
        variables = {**order.variables, "PATH": path, VARIABLE: identity(os.getpid())}
        with self._lock:
            if not self._is_killed:
                self._attempt = start_here(spec, argv_of(spec), part, file, self._log, variables)
                self._begun = order, part, ray_nodes

    def begun(self) -> Begun | None:
        """Returns what was started here; None if nothing was."""
        if self._begun is None or self._attempt is None:
            return None
        order, part, ray_nodes = self._begun
        return Begun(
            order=order,
            part=part,
            ray_nodes=ray_nodes,
            identity=identity(os.getpid()),
            pids=self._attempt.pids,
        )

    def poll(self, kept: int | None) -> Polled:
        """Returns how the processes have ended, if they have, and what they have written after ``kept``.

        kept: `Polled.end` of what the caller has kept. None, for a new caller: what the one before it has
        not said to have kept comes again.
        """
        ended = self._attempt.ended() if self._attempt is not None else None
        self._kept = kept if kept is not None else self._kept
        output, is_all = b"", True
        if self._log.exists():
            with self._log.open("rb") as log:
                log.seek(self._kept)
                output = log.read(MAX_OUTPUT_BYTES)
            is_all = len(output) < MAX_OUTPUT_BYTES
            if is_all and ended is None:  # a line's end comes with the next poll
                output = output[: output.rfind(b"\n") + 1]
        return Polled(ended=ended if is_all else None, output=output, end=self._kept + len(output))

    def measured(self, kept: int) -> Measured:
        """Returns what a profiled job has recorded here behind ``kept``."""
        pids = self._attempt.pids if self._attempt is not None else []
        return measured(self._folder, kept, sum(map(own_bytes, pids)), time.monotonic())

    def end(self, grace_s: float) -> None:
        """Tells the processes to end."""
        if self._attempt is not None:
            self._attempt.end(grace_s)

    def kill(self) -> None:
        """Returns when none of the processes runs any more, and their host memory and files are gone."""
        with self._lock:
            self._is_killed = True
            if self._attempt is not None:
                self._attempt.kill()
        remove(self._cache, self._folder)


def _kept_here(spec: RunSpec, part: HostPart) -> tuple[JobNode, ...]:
    """Returns the nodes whose working sets are kept on the host of a job's part."""
    if spec.launch is Launch.ONCE:  # its one process has the state of all nodes
        return part.nodes
    address = part.nodes[part.index].address
    return tuple(node for node in part.nodes if node.address == address)
