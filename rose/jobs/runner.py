"""A host's runner: starts and ends the processes of whole RL jobs, as the cluster scheduler orders.

Owns one process group per attempt, its job file and its log, and the jobs' cached state in host memory. A
job's death is reported when its whole process group is gone, so that its nodes are really free. When the
runner itself dies, the watchers end all jobs.
"""

import contextlib
import logging
import queue
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rose.config import parse_config
from rose.node.processes import ServerProcess
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.messages import (
    Alive,
    Answer,
    Exited,
    Hello,
    SchedulerMessage,
    Start,
    Stop,
)
from rose.scheduler.runtime.job.job import JobFile
from rose.scheduler.runtime.job.recording import Recording
from rose.scheduler.runtime.job.spec import RunSpec

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""The longest time until a job's death is noticed."""
GRACE_S = 5.0
"""The time between SIGTERM and SIGKILL for a job that is told to end."""
BEAT_S = 1.0
"""The time between an agent's heartbeats; the scheduler's `host_lease_s` is many times longer."""
START_FAILED_STATUS = 127
"""The status that a shell reports for a command that could not be run."""
_NEVER_STARTS = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Other errors, such as too few processes or too little memory, may be gone at the next attempt."""


@dataclass(slots=True)
class _Attempt:
    number: int
    process: ServerProcess
    kill_s: float | None = None
    """When to send SIGKILL, once the attempt was told to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The nodes that a host offers to groups, by pool."""

    host: str
    num_nodes: dict[Phase, int]


class Runner:
    """All jobs of one host. One thread."""

    def __init__(
        self,
        client: ControlClient,
        channel: str,
        folder: Path,
        cache_root: Path,
        *,
        offer: Offer | None = None,
        recording: Recording | None = None,
    ) -> None:
        """folder: job files and logs. cache_root: where suspended phases keep their state.

        offer: of an agent; None: the scheduler's own runner, for all nodes that are asked for.
        recording: jobs are run for their profile.
        """
        self._client = client
        self._channel = channel
        self._offer = offer
        self._beaten_s = time.monotonic()
        self._folder = folder
        self._cache_root = cache_root
        self._recording = recording
        self._running: dict[str, _Attempt] = {}
        self._hello()

    def run(self, check: Callable[[], object]) -> None:
        """Serves orders until ``check``, called in between, raises."""
        while True:
            check()
            self.step()

    def step(self) -> None:
        """Follows one order, if one comes within `POLL_S`, and reports who has ended."""
        with contextlib.suppress(queue.Empty):
            self._follow(self._client.unasked.get(timeout=POLL_S))
        self._bury()
        self._beat()

    def pid_of(self, job: str) -> int | None:
        """The pid of the job's process group leader; None if the job does not run here."""
        attempt = self._running.get(job)
        return attempt.process.pid if attempt is not None else None

    def _beat(self) -> None:
        if self._offer is not None and time.monotonic() - self._beaten_s >= BEAT_S:
            self._beaten_s = time.monotonic()
            self._client.tell(Alive(seq=self._client.next_seq(), host=self._offer.host))

    def close(self) -> None:
        """Ends all jobs' processes; the scheduler starts them again for the next runner."""
        for attempt in self._running.values():
            attempt.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for attempt in self._running.values():
            attempt.process.stop(max(0.0, deadline - time.monotonic()))
        self._running.clear()
        shutil.rmtree(self._cache_root, ignore_errors=True)  # this channel's alone

    def _hello(self) -> None:
        running = {name: attempt.number for name, attempt in self._running.items()}
        logs = str(self._folder / "logs")
        hello = Hello(seq=self._client.next_seq(), running=running, log_folder=logs)
        if self._offer is not None:
            hello = msgspec.structs.replace(hello, host=self._offer.host, num_nodes=self._offer.num_nodes)
        self._client.tell(hello)

    def _follow(self, order: SchedulerMessage | None) -> None:
        match order:
            case None | Answer():  # orders may have been missed; or the scheduler holds us for dead
                self._hello()
            case Start():
                self._start(order)
            case Stop():
                self._stop(order)
            case _:
                raise AssertionError(f"not an order: {order}")

    def _start(self, order: Start) -> None:
        self._bury()  # what was to end at once may be on the same nodes
        before = self._running.get(order.job)
        if before is not None:
            if before.number == order.attempt:
                return
            before.process.stop(0.0)
            del self._running[order.job]
        spec = parse_config(order.spec, RunSpec, f"job {order.job}")
        # What an earlier attempt left may be ahead of the last completed iteration: this one starts cold.
        self._forget(order.job)
        process = self._process(spec, order)
        try:
            process.start()
        except OSError as error:
            reason = f"can't start {list(spec.command)}: {error.strerror}: {str(error.filename)!r}"
            logger.error("%s job=%s", reason, order.job)
            with self._log_path(spec.name).open("a") as log:  # where its user looks first
                log.write(f"{reason}\n")
            is_permanent = isinstance(error, _NEVER_STARTS)
            self._report(
                order.job, order.attempt, START_FAILED_STATUS, cannot_start=reason if is_permanent else None
            )
            return
        self._running[order.job] = _Attempt(order.attempt, process)

    def _process(self, spec: RunSpec, order: Start) -> ServerProcess:
        path = self._folder / "jobs" / spec.name / f"{order.attempt}.json"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = JobFile(
            channel=self._channel,
            name=spec.name,
            attempt=order.attempt,
            first_iteration=order.first_iteration,
            num_iterations=spec.iterations,
            group=order.group,
            rollout_nodes=order.rollout_nodes,
            num_ranks=spec.num_ranks,
            cache_folder=str(self._cache_root / spec.name),
            limit_bytes={name: round(phase.memory_gb * 1e9) for name, phase in spec.phases.items()},
            recording=self._recording,
        )
        path.write_bytes(msgspec.json.encode(file))
        return ServerProcess(
            _argv(spec),
            spec.name,
            self._log_path(spec.name),
            env={"ROSE_JOB": str(path)},
            folder=Path(spec.folder),
        )

    def _log_path(self, job: str) -> Path:
        """The log of all attempts of a job."""
        return self._folder / "logs" / f"{job}.log"

    def _stop(self, order: Stop) -> None:
        attempt = self._running.get(order.job)
        if attempt is not None and attempt.number == order.attempt:
            attempt.process.send_signal(signal.SIGTERM)
            attempt.kill_s = time.monotonic() + (0.0 if order.is_lost else GRACE_S)
        elif not order.forget:  # it never was here, or is gone
            self._report(order.job, order.attempt, -signal.SIGKILL)
        if order.forget:
            self._forget(order.job)

    def _forget(self, job: str) -> None:
        """Frees the host memory of a job, and removes its job files."""
        for folder in (self._cache_root / job, self._folder / "jobs" / job):
            shutil.rmtree(folder, ignore_errors=True)

    def _bury(self) -> None:
        for name, attempt in list(self._running.items()):
            is_late = attempt.kill_s is not None and time.monotonic() >= attempt.kill_s
            if attempt.process.is_alive() and not is_late:
                continue
            exit_status = attempt.process.stop(0.0)
            del self._running[name]
            self._report(
                name, attempt.number, exit_status if exit_status is not None else START_FAILED_STATUS
            )

    def _report(self, job: str, attempt: int, exit_status: int, *, cannot_start: str | None = None) -> None:
        self._client.tell(
            Exited(
                seq=self._client.next_seq(),
                job=job,
                attempt=attempt,
                exit_status=exit_status,
                cannot_start=cannot_start,
            )
        )


def _argv(spec: RunSpec) -> Sequence[str]:
    """The command of the job's process group leader."""
    if spec.ray is None:
        return spec.command
    options = spec.ray.model_dump(exclude_none=True)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "rose.jobs.ray_job", *flags, "--", *spec.command]
