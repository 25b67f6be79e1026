"""The processes of one attempt of a job on one host: how many there are, and what each is told.

Owns these processes, each the leader of a session of its own. An attempt has ended when nothing of any of
them runs any more. If one fails, the others are ended.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from rose.node.processes import ServerProcess
from rose.node.watcher import group_members
from rose.scheduler.cluster.spec import PhaseSpec
from rose.scheduler.runtime.channel.messages import Start
from rose.scheduler.runtime.job.job import JobFile, JobNode
from rose.scheduler.runtime.job.recording import Recording
from rose.scheduler.runtime.job.spec import Launch, RunSpec

logger = logging.getLogger(__name__)

START_FAILED_STATUS = 127
"""The status that a shell reports for a command that could not be run."""
_NEVER_STARTS = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Other errors, such as too few processes or too little memory, may be gone at the next attempt."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt has ended."""

    exit_status: int
    cannot_start: str | None = None
    """Why the command never ran and never will, e.g. that there is no such program."""
    lost: str | None = None
    """Which node has taken the processes with it: the job itself has not failed."""
    why: str | None = None
    """What is known of a crash beyond its status."""


class Attempt(Protocol):
    """One attempt of a job, wherever its processes run."""

    def end(self, grace_s: float) -> None:
        """Sends SIGTERM, and SIGKILL after ``grace_s``. Does not wait; may be called again."""

    def ended(self) -> Ended | None:
        """Returns how the attempt has ended; None while anything of it may still run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart:
    """The part of an attempt that one node of its group runs."""

    nodes: tuple[JobNode, ...]
    """All nodes of the attempt."""
    index: int = 0
    """Which of them this one is."""
    master_port: int


def environments(spec: RunSpec, part: HostPart) -> list[dict[str, str]]:
    """Returns the variables of each process that starts on the node, as torchrun names them."""
    master, node = part.nodes[0], part.nodes[part.index]
    common = {
        "MASTER_ADDR": master.address,
        "MASTER_PORT": str(part.master_port),
        "NNODES": str(len(part.nodes)),
        "NODE_RANK": str(part.index),
    }
    if node.devices:
        common["CUDA_VISIBLE_DEVICES"] = ",".join(node.devices)
    if spec.launch is Launch.ONCE:
        return [common] if part.index == 0 else []
    if spec.launch is Launch.PER_NODE:
        return [common]
    num_local = spec.num_ranks // len(part.nodes)
    return [
        {
            **common,
            "RANK": str(part.index * num_local + local),
            "WORLD_SIZE": str(spec.num_ranks),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(num_local),
        }
        for local in range(num_local)
    ]


class LocalAttempt:
    """The processes of an attempt on this host."""

    def __init__(self, processes: Sequence[ServerProcess], ended: Ended | None = None) -> None:
        self._processes = processes
        self._kill_s: float | None = None
        self._ended = ended

    @property
    def pid(self) -> int | None:
        """Returns the first process's pid, which leads its session; None if none was started."""
        return self._processes[0].pid if self._processes else None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def end(self, grace_s: float) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        self._kill_s = time.monotonic() + grace_s

    def ended(self) -> Ended | None:
        if self._ended is not None:
            return self._ended
        has_failed = any(process.exit_status for process in self._processes)
        is_late = self._kill_s is not None and time.monotonic() >= self._kill_s
        if any(process.is_alive() for process in self._processes) and not has_failed and not is_late:
            return None
        failed = next((process.exit_status for process in self._processes if process.exit_status), None)
        statuses = [process.stop(0.0) for process in self._processes]
        first = failed if failed is not None else next((each for each in statuses if each != 0), 0)
        self._ended = Ended(exit_status=first if first is not None else START_FAILED_STATUS)
        return self._ended

    def kill(self) -> None:
        """Returns when nothing of the attempt runs any more."""
        for process in self._processes:
            process.stop(0.0)


def own_bytes(leader_pid: int) -> int:
    """Returns the resident memory of all processes of a group, without files and shared memory.

    So a working set counts while it is loaded, and its copy in host memory does not.
    """
    num_pages = 0
    for pid in group_members(leader_pid):
        try:
            resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
        except (OSError, ValueError):  # it ended while we looked
            continue
        num_pages += int(resident) - int(shared)
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def start_here(
    spec: RunSpec,
    argv: Sequence[str],
    part: HostPart,
    job_file: Path,
    log_path: Path,
    variables: Mapping[str, str],
) -> LocalAttempt:
    """Starts the node's processes with ``variables`` in their environment.

    One that can't be started ends the attempt, with the reason in its log.
    """
    started: list[ServerProcess] = []
    try:
        for each in environments(spec, part):
            env = {**each, **variables, "ROSE_JOB": str(job_file)}
            process = ServerProcess(argv, spec.name, log_path, env=env, folder=Path(spec.folder))
            started.append(process.start())
    except OSError as error:
        LocalAttempt(started).kill()
        reason = f"can't start {list(spec.command)}: {error.strerror}: {str(error.filename)!r}"
        logger.error("%s job=%s", reason, spec.name)
        with contextlib.suppress(OSError), log_path.open("a") as log:  # where its user looks first
            log.write(f"{reason}\n")
        why = reason if isinstance(error, _NEVER_STARTS) else None
        return LocalAttempt([], Ended(exit_status=START_FAILED_STATUS, cannot_start=why))
    return LocalAttempt(started, None if started else Ended(exit_status=0))


def write_job_file(
    path: Path,
    spec: RunSpec,
    order: Start,
    *,
    channel: str,
    cache: Path,
    nodes: Sequence[JobNode],
    kept_here: Sequence[JobNode] | None = None,
    own_node: int = 0,
    recording: Recording | None = None,
) -> Path:
    """Writes what the job's processes on this host are told.

    kept_here: the nodes whose working sets are kept on this host; None: all of them. own_node: which of the
    nodes starts the processes.
    """
    kept = kept_here if kept_here is not None else nodes
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = JobFile(
        channel=channel,
        name=spec.name,
        attempt=order.attempt,
        first_iteration=order.first_iteration,
        num_iterations=spec.iterations,
        group=order.group,
        rollout_nodes=order.rollout_nodes,
        nodes=list(nodes),
        num_ranks=spec.num_ranks,
        cache_folder=str(cache),
        limit_bytes={name: limit_bytes(name, phase, kept) for name, phase in spec.phases.items()},
        recording=recording,
        own_node=own_node,
    )
    path.write_bytes(msgspec.json.encode(file))
    return path


def limit_bytes(name: str, phase: PhaseSpec, nodes: Sequence[JobNode]) -> int:
    """Returns the host memory that all ranks of a phase may keep together on a host with these nodes.

    A rank on a host without nodes of the phase may keep as much as one node holds.
    """
    num_nodes = sum(node.name.startswith(f"{name}-") for node in nodes)
    return round(phase.memory_gb * 1e9) * max(1, num_nodes)


def argv_of(spec: RunSpec) -> list[str]:
    """Returns the command of each process, with a Ray of its own before it if the job asks for one."""
    if spec.ray is None:
        return list(spec.command)
    options = spec.ray.model_dump(exclude_none=True)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "rose.jobs.ray_job", *flags, "--", *spec.command]


def remove(*folders: Path) -> None:
    """Frees what a job has left in these folders."""
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder, ignore_errors=True)
