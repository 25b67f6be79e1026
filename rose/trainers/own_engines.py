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
from rose.scheduler.runtime.job.job import REPORT_S, running_job

logger = logging.getLogger(__name__)

Done = TypeVar("Done")


class OwnEngines:
    """``nodes``: the engines' addresses on each of the job's rollout nodes, in the order of
    `Progress.rollout_nodes`. Engines with a key want it in ROSE_KEY here as well."""

    def __init__(self, nodes: Sequence[Sequence[str]]) -> None:
        self._nodes = [[EngineControl(url, "") for url in urls] for urls in nodes]
        self._seen: dict[str, WorkerStatus] = {}
        self._freed: set[int] = set()
        """The rollout nodes that the present rollout's tail has left, by their numbers in the group."""

    def load(self, cache: HostCache) -> None:
        """Activates all engines. Raises: WorkerError if one can't be; ConfigError."""
        _each(EngineControl.activate, self._engines())
        self._freed = set()

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
        left = {number: node for number, node in self._by_number() if number not in keep}
        _each(EngineControl.deactivate, [engine for node in left.values() for engine in node])
        self._freed = set(left)

    def engine_runs(self) -> list[EngineRun]:
        """Returns what each node's engines have computed since the last call; nothing for the nodes that the
        tail has left. Raises: WorkerError if an engine doesn't answer in `REPORT_S`; ConfigError."""
        nodes = [[] if number in self._freed else node for number, node in self._by_number()]
        engines = [engine for node in nodes for engine in node]
        found = _each(lambda engine: engine.status(REPORT_S), engines)
        before, now = self._seen, {each.url: status for each, status in zip(engines, found, strict=True)}
        self._seen = before | now
        return [run_between([(before.get(each.url), now[each.url]) for each in node]) for node in nodes]

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


def run_between(statuses: Sequence[tuple[WorkerStatus | None, WorkerStatus]]) -> EngineRun:
    """Returns what the engines of one node have computed between two statuses of each; nothing of those
    without an earlier status.

    Engines and data-parallel ranks step side by side: the steps are those of the one that made most.
    """
    runs = [run for before, now in statuses for run in _rank_runs(before, now)]
    longest = max(runs, key=lambda run: run.num_steps, default=None)
    return EngineRun(
        num_steps=longest.num_steps if longest is not None else 0,
        seconds=longest.seconds if longest is not None else 0.0,
        tokens=sum(run.tokens for run in runs),
        generated=sum(run.generated for run in runs),
        num_requests=sum(now.num_running + now.num_waiting for _, now in statuses),
    )


def _rank_runs(before: WorkerStatus | None, now: WorkerStatus) -> list[EngineRun]:
    if before is None:
        return []
    # An engine that was started anew may have another number of ranks.
    pairs = zip(before.ranks or [before], now.ranks or [now], strict=False)
    return [_rank_run(*pair) for pair in pairs]


def _rank_run(before: WorkerStatus, now: WorkerStatus) -> EngineRun:
    def more(name: str) -> float:
        # An engine that was started anew counts from 0.
        begun: float = getattr(before, name) if before.steps <= now.steps else 0
        ended: float = getattr(now, name)
        return ended - begun

    return EngineRun(
        num_steps=int(more("steps")),
        seconds=more("busy_s"),
        tokens=int(more("computed_tokens")),
        generated=int(more("generated_tokens")),
        num_requests=now.num_running + now.num_waiting,
    )


def _each(do: Callable[[EngineControl], Done], engines: Sequence[EngineControl]) -> list[Done]:
    """Does it with all at once: an engine reads its weights for seconds. Raises what the first one raised."""
    with ThreadPoolExecutor(max(1, len(engines))) as threads:
        return list(threads.map(do, engines))
