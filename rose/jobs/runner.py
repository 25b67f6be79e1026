"""The runner: starts and ends whole RL jobs, as the cluster scheduler orders, on an engine.

Owns the attempts that run. A job's death is reported when nothing of the attempt runs any more, so that its
nodes are really free. An engine starts processes: on this host (`HostEngine`), where they end with the
runner, or on a Ray cluster (rose.jobs.on_ray.engine), where they go on and the next runner adopts them.
"""

import contextlib
import logging
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rose.config import parse_config, visible_devices
from rose.jobs.cache_folder import CacheFolder
from rose.jobs.ranks import (
    START_FAILED_STATUS,
    Attempt,
    Ended,
    HostPart,
    LocalAttempt,
    argv_of,
    remove,
    start_here,
    write_job_file,
)
from rose.ports import free_port
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.messages import (
    Awaiting,
    Call,
    Exited,
    Hello,
    SchedulerMessage,
    Start,
    Stop,
)
from rose.scheduler.runtime.job.device_memory import num_devices_here
from rose.scheduler.runtime.job.job import JobNode
from rose.scheduler.runtime.job.recording import Recording
from rose.scheduler.runtime.job.spec import RunSpec

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""The longest time until a job's death is noticed."""
GRACE_S = 5.0
"""The time between SIGTERM and SIGKILL for a job that is told to end."""
CLOSE_S = 30.0
"""What has not ended by then ends by itself when its runner has gone."""


class Engine(Protocol):
    """A place where jobs run: this host, or a Ray cluster. One thread calls it."""

    host: str
    log_folder: Path
    outlives: bool
    """Whether attempts go on when the runner ends."""

    def waits_for(self) -> str | None:
        """Returns what must happen before jobs can start here, at first or again; None: they can."""

    def adopted(self) -> Mapping[str, tuple[int, Attempt]]:
        """Returns the attempts of an earlier runner, with their numbers."""

    def num_nodes(self) -> dict[Phase, int] | None:
        """Returns how many nodes groups may use, by pool; None: as many as are asked for."""

    def num_devices(self) -> int:
        """Returns the GPUs of the host where all nodes are; 0 if there are several hosts, none or unknown."""

    def check(self) -> None:
        """Raises: WorkerError if no job can run here any more."""

    def start(self, spec: RunSpec, order: Start, before: Attempt | None) -> Attempt:
        """Starts an attempt, once nothing of ``before`` runs any more. Does not wait for long."""

    def forget(self, job: str) -> None:
        """Frees the host memory, the files and the nodes of a job that is over or leaves its group."""

    def news(self, running: Mapping[str, int]) -> Sequence[Callable[[int], Call]]:
        """Returns what the scheduler should know since the last call, as calls that lack their number."""

    def close(self) -> None:
        """Frees what does not outlive the runner. No attempt runs any more but those that outlive it."""


@dataclass(slots=True)
class _Running:
    number: int
    attempt: Attempt


class Runner:
    """All jobs of one engine. One thread."""

    def __init__(self, client: ControlClient, engine: Engine) -> None:
        self._client = client
        self._engine = engine
        self._running: dict[str, _Running] = {}
        self._is_known = False
        """The scheduler has been told of this runner."""
        self._waits_for: str | None = None
        self._introduce()

    def run(self, check: Callable[[], object]) -> None:
        """Serves orders until ``check``, called in between, raises."""
        while True:
            check()
            self.step()

    def step(self) -> None:
        """Follows one order, if one comes within `POLL_S`, and reports who has ended."""
        with contextlib.suppress(queue.Empty):
            self._follow(self._client.unasked.get(timeout=POLL_S))
        if not self._is_known:
            self._introduce()
            return
        self._bury()
        self._say_wait(self._engine.waits_for())
        for news in self._engine.news({name: each.number for name, each in self._running.items()}):
            self._client.tell(news(self._client.next_seq()))

    def pids_of(self, job: str) -> Sequence[int]:
        """Returns the pids of the job's processes that lead their sessions; none if it does not run here."""
        running = self._running.get(job)
        return running.attempt.pids if running and isinstance(running.attempt, LocalAttempt) else []

    def close(self) -> None:
        """Ends all jobs' processes that do not outlive the runner. The next runner has their jobs again."""
        if not self._engine.outlives:
            for running in self._running.values():
                running.attempt.end(GRACE_S)
            deadline = time.monotonic() + CLOSE_S
            while self._running and time.monotonic() < deadline:
                self._running = {k: each for k, each in self._running.items() if each.attempt.ended() is None}
                time.sleep(POLL_S)
        self._running.clear()
        self._engine.close()

    def _introduce(self) -> None:
        """Tells the scheduler of this runner, or what the runner waits for until then."""
        waits_for = self._engine.waits_for()
        if waits_for is None:
            self._running = {
                job: _Running(number, attempt) for job, (number, attempt) in self._engine.adopted().items()
            }
            self._is_known = True
            self._hello()
        else:
            self._say_wait(waits_for)

    def _say_wait(self, waits_for: str | None) -> None:
        """Tells the scheduler what the runner waits for, unless it knows. News say that the wait is over."""
        if waits_for == self._waits_for:
            return
        self._waits_for = waits_for
        if waits_for is not None:
            logger.info("waits for %s", waits_for)
            self._client.tell(Awaiting(seq=self._client.next_seq(), what=waits_for))

    def _hello(self) -> None:
        running = {name: each.number for name, each in self._running.items()}
        self._client.tell(
            Hello(
                seq=self._client.next_seq(),
                running=running,
                log_folder=str(self._engine.log_folder),
                host=self._engine.host,
                num_nodes=self._engine.num_nodes(),
                num_devices=self._engine.num_devices(),
            )
        )

    def _follow(self, order: SchedulerMessage | None) -> None:
        match order:
            case None:  # orders may have been missed, and what the runner has said may be forgotten
                self._waits_for = None
                if self._is_known:
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
        if before is not None and before.number == order.attempt:
            return
        if before is not None:
            before.attempt.end(0.0)
        spec = parse_config(order.spec, RunSpec, f"job {order.job}")
        attempt = self._engine.start(spec, order, before.attempt if before is not None else None)
        self._running[order.job] = _Running(order.attempt, attempt)

    def _stop(self, order: Stop) -> None:
        running = self._running.get(order.job)
        if running is not None and running.number == order.attempt:
            running.attempt.end(0.0 if order.is_lost else GRACE_S)
        elif not order.forget:  # it never was here, or is gone
            self._report(order.job, order.attempt, Ended(exit_status=-signal.SIGKILL))
        if order.forget:
            self._engine.forget(order.job)

    def _bury(self) -> None:
        for name, running in list(self._running.items()):
            if (ended := running.attempt.ended()) is not None:
                del self._running[name]
                self._report(name, running.number, ended)

    def _report(self, job: str, attempt: int, how: Ended) -> None:
        self._client.tell(
            Exited(
                seq=self._client.next_seq(),
                job=job,
                attempt=attempt,
                exit_status=how.exit_status,
                cannot_start=how.cannot_start,
                lost=how.lost,
                why=how.why,
            )
        )


class HostEngine:
    """Runs jobs on this host. Its files and host memory are in folders of its own."""

    host = "local"
    outlives = False

    def __init__(
        self,
        channel: str,
        folder: Path,
        cache_root: Path,
        *,
        recording: Recording | None = None,
    ) -> None:
        """folder: job files and logs. cache_root: where suspended phases keep their state, by the channel.

        recording: jobs are run for their profile.
        """
        self.log_folder = job_logs(folder, cache_root.name)
        self._channel = channel
        self._files = job_files(folder, cache_root)
        self._cache = CacheFolder(cache_root)
        self._recording = recording

    def waits_for(self) -> str | None:
        return None

    def adopted(self) -> Mapping[str, tuple[int, Attempt]]:
        return {}

    def num_nodes(self) -> dict[Phase, int] | None:
        return None

    def num_devices(self) -> int:
        visible = visible_devices()
        return len(visible) if visible is not None else num_devices_here()

    def check(self) -> None:
        return

    def start(self, spec: RunSpec, order: Start, before: Attempt | None) -> Attempt:
        if before is not None:
            while before.ended() is None:
                time.sleep(POLL_S)
        # What an earlier attempt left may be ahead of the last completed iteration: this one starts cold.
        self.forget(spec.name)
        try:
            return self._start(spec, order)
        except OSError as error:  # such as a full disk: the runner and the other jobs go on
            why = f"its files can't be written: {error}; make room under {self._files.parents[1]}"
            logger.error("%s job=%s", why, spec.name)
            return LocalAttempt([], Ended(exit_status=START_FAILED_STATUS, why=why))

    def _start(self, spec: RunSpec, order: Start) -> LocalAttempt:
        """Raises: OSError."""
        names = [f"rollout-{node}" for node in order.rollout_nodes]
        names += [f"train-{node}" for node in range(order.num_train_nodes)]
        nodes = tuple(JobNode(name=name, address="127.0.0.1") for name in names)
        file = write_job_file(
            self._files / spec.name / f"{order.attempt}.json",
            spec,
            order,
            channel=self._channel,
            cache=self._cache.path / spec.name,
            nodes=nodes,
            recording=self._recording,
        )
        # All nodes of a job are this machine, so it starts as on one node.
        part = HostPart(nodes=nodes[:1], master_port=free_port())
        self.log_folder.mkdir(parents=True, exist_ok=True)
        return start_here(
            spec, argv_of(spec), part, file, self.log_folder / f"{spec.name}.log", order.variables
        )

    def forget(self, job: str) -> None:
        remove(self._cache.path / job, self._files / job)

    def news(self, running: Mapping[str, int]) -> Sequence[Callable[[int], Call]]:
        return ()

    def close(self) -> None:
        self._cache.close()
        remove(self._files)  # this channel's alone


def job_files(folder: Path, cache_root: Path) -> Path:
    """Returns the folder of job files. Each channel has its own, like the cache, because another scheduler
    may have a job of the same name in the same folder."""
    return folder / "jobs" / cache_root.name


def job_logs(folder: Path, channel: str) -> Path:
    """Returns the folder of the logs of one channel's jobs, for the same reason. channel: its short name."""
    return folder / "logs" / channel
