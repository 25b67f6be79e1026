"""The engine of a runner whose jobs run on a Ray cluster.

Owns the jobs' logs on this host, to which all nodes' output is copied, and what the scheduler is told of the
cluster's nodes. Everything on other hosts ends with this process.
"""

import io
import logging
import queue
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rose.errors import ConfigError
from rose.jobs.on_ray.attempt import RayAttempt
from rose.jobs.on_ray.cluster import RayNodes, describe_self
from rose.jobs.on_ray.groups import GroupNodes
from rose.jobs.ranks import Attempt
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import Call, Nodes, Placed, Start
from rose.scheduler.runtime.job.spec import RunSpec, ServeSpec

logger = logging.getLogger(__name__)

MAX_CODE_BYTES = 500 << 20


class RayEngine:
    """Runs jobs on the Ray cluster of the cluster's file."""

    host = "ray"

    def __init__(self, cluster: ServeSpec, channel: str, folder: Path) -> None:
        """Joins the cluster. Raises: ConfigError."""
        assert cluster.ray is not None
        self.log_folder = folder / "logs"
        self.log_folder.mkdir(parents=True, exist_ok=True)
        self._channel = channel
        self._root = f"{zlib.crc32(channel.encode()):08x}"
        pools = cluster.pools.to_pools()
        limits = {Phase.ROLLOUT: pools.rollout.num_nodes, Phase.TRAIN: pools.train.num_nodes}
        self._nodes = RayNodes(cluster.ray, limits, describe_self(channel), self._root)
        try:
            check_channel(channel, self._nodes.addresses())
        except ConfigError:
            self._nodes.close()
            raise
        self._groups = GroupNodes(cluster.ray)
        self._attempts: dict[str, RayAttempt] = {}
        """The latest of each job that has nodes."""
        self._said: queue.SimpleQueue[Callable[[int], Call]] = queue.SimpleQueue()
        self._told: tuple[dict[Phase, int], dict[str, int]] | None = None

    def check(self) -> None:
        """Raises: WorkerError when the Ray cluster is gone."""
        self._nodes.check()

    def num_nodes(self) -> dict[Phase, int]:
        idle = self._groups.view(self._nodes.draining).num_idle
        return {kind: max(0, num - idle[kind]) for kind, num in self._nodes.num_nodes().items()}

    def start(self, spec: RunSpec, order: Start, before: Attempt | None) -> Attempt:
        attempt = self._attempts[spec.name] = RayAttempt(
            spec,
            order,
            nodes=self._nodes,
            groups=self._groups,
            channel=self._channel,
            root=self._root,
            code=partial(packed, spec),
            log=self.log_folder / f"{spec.name}.log",
            say=partial(self._placed, order),
            before=before,
        )
        return attempt

    def forget(self, job: str) -> None:
        if job in self._attempts:
            self._attempts.pop(job).leave_group()

    def news(self, running: Mapping[str, int]) -> Sequence[Callable[[int], Call]]:
        news: list[Callable[[int], Call]] = []
        while not self._said.empty():
            news.append(self._said.get())
        leaving = {
            job: running[job] for job in self._groups.view(self._nodes.draining).leaving if job in running
        }
        told = (self.num_nodes(), leaving)
        if told != self._told:
            self._told = told
            logger.info("nodes %s leaving=%s", told[0], sorted(leaving))
            news.append(lambda seq: Nodes(seq=seq, num_nodes=told[0], leaving=leaving))
        return news

    def close(self) -> None:
        if self._nodes.is_there():  # else all that follows would wait for the head
            self._groups.close()
            self._nodes.close()

    def _placed(self, order: Start, places: list[str]) -> None:
        self._said.put(lambda seq: Placed(seq=seq, job=order.job, attempt=order.attempt, places=places))


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
            f"runtime_env.working_dir {folder}: can't be read ({error}); mend that and submit the job again"
        ) from error
    return file.getvalue()
