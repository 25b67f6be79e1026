"""The engine of a runner whose jobs run on a Ray cluster.

Owns the jobs' logs on this host, to which all nodes' output is copied, and what the scheduler is told of the
cluster's nodes. Jobs go on when this process ends, and the next one adopts them. Profiled jobs end with it.
"""

import io
import logging
import queue
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rose.config import parse_config
from rose.errors import ConfigError, WorkerError
from rose.jobs.on_ray.adopt import find
from rose.jobs.on_ray.attempt import RayAttempt
from rose.jobs.on_ray.cluster import NAMESPACE, RayNodes, channel_root, describe_self
from rose.jobs.on_ray.ending import AttemptSetup, AttemptThread, Remains
from rose.jobs.on_ray.groups import GroupNodes, Seat
from rose.jobs.on_ray.measured import RayRecording
from rose.jobs.on_ray.parts import PartRef
from rose.jobs.ranks import Attempt
from rose.jobs.runner import job_logs
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import Call, Nodes, Placed, Start
from rose.scheduler.runtime.job.spec import RunSpec, ServeSpec

logger = logging.getLogger(__name__)

MAX_CODE_BYTES = 500 << 20
LET_GO_S = 3.0
JOIN_S = 120.0
"""The longest wait for one step of joining Ray."""


class RayEngine:
    """Runs jobs on the Ray cluster of the cluster's file. A thread joins it."""

    host = "ray"

    def __init__(
        self, cluster: ServeSpec, channel: str, folder: Path, recording: RayRecording | None = None
    ) -> None:
        """Begins to join the cluster; `waits_for` says how far it is.

        recording: jobs are run for their profile.
        """
        assert cluster.ray is not None
        self.outlives = recording is None
        self.log_folder = job_logs(folder, channel_root(channel))
        self.log_folder.mkdir(parents=True, exist_ok=True)
        self._cluster, self._spec = cluster, cluster.ray
        self._channel, self._recording = channel, recording
        self._attempts: dict[str, AttemptThread] = {}
        """The latest of each job that has nodes."""
        self._adopted: dict[str, tuple[int, Attempt]] = {}
        self._said: queue.SimpleQueue[Callable[[int], Call]] = queue.SimpleQueue()
        self._told: tuple[dict[Phase, int], dict[str, int]] | None = None
        self._waits_for: str | None = "Ray"
        self._waits_since_s, self._waits_most_s = time.monotonic(), JOIN_S
        self._failed: Exception | None = None
        self._has_signals = False
        self._thread = threading.Thread(target=self._join, name="rose-ray-join", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        root = channel_root(self._channel)
        pools = self._cluster.to_pools()
        limits = {Phase.ROLLOUT: pools.rollout.num_nodes, Phase.TRAIN: pools.train.num_nodes}
        try:
            namespace = f"{NAMESPACE}-{root}"
            self._nodes = RayNodes(self._spec, limits, describe_self(self._channel), namespace, self._wait)
            check_channel(self._channel, self._nodes.addresses())
            self._wait("the jobs that an earlier scheduler has left to answer", JOIN_S + self._spec.hung_s)
            groups = GroupNodes(self._spec, root, "detached" if self.outlives else None)
            self._setup = AttemptSetup(
                nodes=self._nodes,
                groups=groups,
                channel=self._channel,
                root=root,
                hung_s=self._spec.hung_s,
                recording=self._recording,
            )
            self._adopt()
        except Exception as error:
            self._failed = error
        else:
            self._waits_for = None

    def _wait(self, what: str, most_s: float = JOIN_S) -> None:
        self._waits_since_s, self._waits_most_s = time.monotonic(), most_s
        self._waits_for = what

    def _adopt(self) -> None:
        survivors, broken = find(self._setup.groups, self._spec.hung_s)
        for each in survivors:
            spec = parse_config(each.order.spec, RunSpec, f"job {each.order.job}")
            attempt = self._attempt(spec, each.order, running=(each.seats, each.parts))
            self._adopted[spec.name] = (each.order.attempt, attempt)
        for job, left in broken.items():
            number, parts = left.attempt, left.parts
            logger.warning("not adopted job=%s attempt=%d parts=%d", job, number, len(parts))
            remains = Remains(job, parts, self._setup, partial(self._placed, job, number))
            self._attempts[job] = remains
            self._adopted[job] = (number, remains)

    def waits_for(self) -> str | None:
        if self._waits_for is not None:
            return self._waits_for
        if (late := self._nodes.late()) is not None:
            self._told = None  # the nodes are said again when the head is back, which ends the wait
        return late

    def adopted(self) -> Mapping[str, tuple[int, Attempt]]:
        return self._adopted

    def check(self) -> None:
        """Raises: ConfigError if the cluster can't be used; WorkerError if it does not answer."""
        if self._failed is not None:
            raise self._failed
        if (waits_for := self._waits_for) is None:
            if not self._has_signals:  # Ray's own handler, which prints a trace, would come before Python's
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
                self._has_signals = True
            self._nodes.check()
        elif (waited_s := time.monotonic() - self._waits_since_s) > self._waits_most_s:
            raise WorkerError(
                f"waited {waited_s:.0f} s for {waits_for}; see whether `ray status` answers on this host, "
                "then start this command again: jobs on Ray go on meanwhile"
            )

    def num_nodes(self) -> dict[Phase, int]:
        idle = self._setup.groups.view(self._nodes.draining).num_idle
        return {kind: max(0, num - idle[kind]) for kind, num in self._nodes.num_nodes().items()}

    def num_devices(self) -> int:
        return 0

    def start(self, spec: RunSpec, order: Start, before: Attempt | None) -> Attempt:
        return self._attempt(spec, order, before=before)

    def _attempt(
        self,
        spec: RunSpec,
        order: Start,
        *,
        before: Attempt | None = None,
        running: tuple[Sequence[Seat], Sequence[PartRef]] | None = None,
    ) -> RayAttempt:
        attempt = RayAttempt(
            spec,
            order,
            setup=self._setup,
            code=partial(packed, spec),
            log=self.log_folder / f"{spec.name}.log",
            say=partial(self._placed, order.job, order.attempt),
            before=before,
            running=running,
        )
        self._attempts[spec.name] = attempt
        return attempt

    def forget(self, job: str) -> None:
        if job in self._attempts:
            self._attempts.pop(job).leave_group()

    def news(self, running: Mapping[str, int]) -> Sequence[Callable[[int], Call]]:
        news: list[Callable[[int], Call]] = []
        while not self._said.empty():
            news.append(self._said.get())
        if self._nodes.late() is not None:
            return news
        leaving = {
            job: running[job]
            for job in self._setup.groups.view(self._nodes.draining).leaving
            if job in running
        }
        told = (self.num_nodes(), leaving)
        if told != self._told:
            self._told = told
            logger.info("nodes %s leaving=%s", told[0], sorted(leaving))
            news.append(lambda seq: Nodes(seq=seq, num_nodes=told[0], leaving=leaving))
        return news

    def close(self) -> None:
        for attempt in self._attempts.values():
            if not self.outlives:
                attempt.leave_group()
            attempt.let_go()
        deadline = time.monotonic() + LET_GO_S
        for attempt in self._attempts.values():
            attempt.wait_gone(max(0.0, deadline - time.monotonic()))
        if self._waits_for is None and self._nodes.is_there():  # else this would wait for the head
            self._nodes.close()

    def _placed(self, job: str, attempt: int, places: list[str], runs: bool) -> None:
        self._said.put(lambda seq: Placed(seq=seq, job=job, attempt=attempt, places=places, runs=runs))


def check_channel(channel: str, addresses: Sequence[str]) -> None:
    """Raises: ConfigError if processes on the cluster's hosts can't reach the channel."""
    is_local = channel.startswith("unix:") or "//127." in channel or "//localhost" in channel
    if is_local and len(addresses) > 1:
        raise ConfigError(
            f"channel {channel}: only processes of this host reach it, and the Ray cluster has "
            f"{len(addresses)} hosts ({', '.join(addresses)}); start Redis and give --channel "
            "redis://HOST:PORT/0 with an address that all of them reach"
        )


def packed(spec: RunSpec) -> bytes | None:
    """Returns the job's folder of code as a zip file; None if there is none, or Ray itself fetches it.

    Raises: ConfigError if it can't be read or is too large.
    """
    folder = spec.runtime_env.get("working_dir")
    if folder is None or "://" in str(folder):
        return None
    file = io.BytesIO()
    try:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
            for path in sorted(Path(folder).rglob("*")):
                parts = path.relative_to(folder).parts
                if path.is_file() and not {".git", "__pycache__"} & set(parts):
                    archive.write(path, path.relative_to(folder))
                    if file.tell() > MAX_CODE_BYTES:
                        raise ConfigError(
                            f"runtime_env.working_dir {folder}: more than {MAX_CODE_BYTES >> 20} MiB,"
                            " the most that is sent to each host; keep data elsewhere, and only code there"
                        )
    except OSError as error:
        raise ConfigError(
            f"runtime_env.working_dir {folder}: can't be read ({error}); correct it and submit the job again"
        ) from error
    return file.getvalue()
