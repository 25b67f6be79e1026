"""A job's own rollout engines of ROSE, as the working set of its rollouts and as what moves their tails.

    engines = OwnEngines([["http://10.0.0.1:8001"], ["http://10.0.0.2:8001"]])

    @rose.phase("rollout", working_set=engines, move_tail=engines.move_tail)

The engines run all the time, and are active only while the job holds their nodes. An inactive engine has
given its weights and KV back. Turns of a router go on at the engines that are left, behind the tokens that
they have.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rose.errors import ConfigError, WorkerError
from rose.messages import WorkerStatus
from rose.node.control import EngineControl
from rose.scheduler.runtime.channel.messages import EngineRun
from rose.scheduler.runtime.job.cache import HostCache
from rose.scheduler.runtime.job.job import running_job

logger = logging.getLogger(__name__)

Done = TypeVar("Done")


class OwnEngines:
    """``nodes``: the engines' addresses on each of the job's rollout nodes, in the order of
    `Progress.rollout_nodes`. Engines with a key want it in ROSE_KEY here as well."""

    def __init__(self, nodes: Sequence[Sequence[str]]) -> None:
        self._nodes = [[EngineControl(url, "") for url in urls] for urls in nodes]
        self._seen: dict[str, WorkerStatus] = {}

    def load(self, cache: HostCache) -> None:
        """Activates all engines. Raises: WorkerError if one can't be; ConfigError."""
        _each(EngineControl.activate, self._engines())

    def offload(self, cache: HostCache) -> None:
        """Deactivates all engines, which frees their devices. Raises: WorkerError; ConfigError."""
        _each(EngineControl.deactivate, self._engines())

    def take_memory(self, share: float) -> None:
        """Bounds each engine's slabs by this share of the rollout budget of its pool, in which it has to be
        the job's only one. An engine that refuses, such as one in no pool, stays as it is, which the log
        says. Raises: ConfigError."""
        _each(lambda engine: _bound(engine, share), self._engines())

    def move_tail(self, keep: Sequence[int]) -> None:
        """Frees the job's rollout nodes but these, by their numbers in the group. Raises: WorkerError;
        ConfigError."""
        left = [node for number, node in self._by_number() if number not in keep]
        _each(EngineControl.deactivate, [engine for node in left for engine in node])

    def engine_runs(self) -> list[EngineRun]:
        """Returns what each node's engines have computed since the last call. Raises: WorkerError;
        ConfigError."""
        engines = self._engines()
        before, found = self._seen, _each(EngineControl.status, engines)
        self._seen = {engine.url: status for engine, status in zip(engines, found, strict=True)}
        return [
            _run([(before.get(engine.url), self._seen[engine.url]) for engine in node])
            for _, node in self._by_number()
        ]

    def _engines(self) -> list[EngineControl]:
        return [engine for _, node in self._by_number() for engine in node]

    def _by_number(self) -> list[tuple[int, Sequence[EngineControl]]]:
        job = running_job()
        return by_number(job.rollout_nodes if job is not None else range(len(self._nodes)), self._nodes)


def by_number(
    numbers: Sequence[int], nodes: Sequence[Sequence[EngineControl]]
) -> list[tuple[int, Sequence[EngineControl]]]:
    """Returns each rollout node's number in the group with its engines. Raises: ConfigError if the job has
    more nodes or fewer than there are engines for."""
    if len(numbers) != len(nodes):
        raise ConfigError(
            f"OwnEngines has engines for {len(nodes)} rollout nodes, and the job has {len(numbers)}; "
            "give the engines of each node, and leave out borrow.fewest_nodes, which hands nodes back"
        )
    return list(zip(numbers, nodes, strict=True))


def _bound(engine: EngineControl, share: float) -> None:
    try:
        engine.set_memory_share(share)
    except WorkerError as error:
        logger.warning("an engine takes no share of memory: url=%s error=%s", engine.url, error)


def _run(statuses: Sequence[tuple[WorkerStatus | None, WorkerStatus]]) -> EngineRun:
    """Returns what the engines of one node, which step side by side, have computed between two statuses."""

    def more(name: str) -> float:
        # An engine that was started anew counts from 0.
        return sum(
            getattr(now, name) - (getattr(before, name) if before and before.steps <= now.steps else 0)
            for before, now in statuses
        )

    num_engines = max(1, len(statuses))
    return EngineRun(
        num_steps=round(more("steps") / num_engines),
        seconds=more("busy_s") / num_engines,
        tokens=int(more("computed_tokens")),
        generated=int(more("generated_tokens")),
        num_requests=sum(now.num_running + now.num_waiting for _, now in statuses),
    )


def _each(do: Callable[[EngineControl], Done], engines: Sequence[EngineControl]) -> list[Done]:
    """Does it with all at once: an engine reads its weights for seconds. Raises what the first one raised."""
    with ThreadPoolExecutor(max(1, len(engines))) as threads:
        return list(threads.map(do, engines))
