"""A job's own rollout engines of ROSE, as the working set of its rollouts and as what moves their tails.

    engines = OwnEngines([["http://10.0.0.1:8001"], ["http://10.0.0.2:8001"]])

    @rose.phase("rollout", working_set=engines, move_tail=engines.move_tail)

The engines run all the time, and are active only while the job holds their nodes. An inactive engine has
given its weights and KV back. Turns of a router go on at the engines that are left, after the tokens that
they have.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import httpx

from rose.errors import ConfigError, WorkerError
from rose.messages import WorkerStatus
from rose.node.control import EngineControl
from rose.scheduler.runtime.channel.messages import EngineRun
from rose.scheduler.runtime.job.cache import HostCache
from rose.scheduler.runtime.job.job import REPORT_S, JobFile, running_job
from rose.scheduler.runtime.job.recording import EngineTimes
from rose.trainers.engine_times import EngineTiming

logger = logging.getLogger(__name__)

Done = TypeVar("Done")


class OwnEngines:
    """``nodes``: the engines' addresses on each rollout node that the job asks for, in the order of
    `Progress.rollout_nodes`. A job that has fewer nodes uses the engines of these (`places`). Engines with a
    key want it in ROSE_KEY here as well. Only rank 0 of a job handles the engines."""

    def __init__(self, nodes: Sequence[Sequence[str]]) -> None:
        self._timing: EngineTiming | None = None
        self._group = ""
        self._places: dict[int, int] = {}
        """For each rollout node of the job in this group, by its number, the index of its engines."""
        self._nodes = [[EngineControl(url, "") for url in urls] for urls in nodes]
        self._has_loaded = False
        self._counting = threading.Lock()
        self._seen: dict[str, WorkerStatus] = {}
        self._freed: set[int] = set()
        """The rollout nodes that the present rollout's tail has left, by their numbers in the group."""

    def load(self, cache: HostCache) -> None:
        """Activates the engines of the job's nodes. The first time, it deactivates all others, which are
        active since they were started. Raises: WorkerError if one can't be activated; ConfigError."""
        if not _leads():
            return
        engines = self._engines()
        if not self._has_loaded:
            _each(_put_aside, [each for node in self._nodes for each in node if each not in engines])
        _each(EngineControl.activate, engines)
        self._freed, self._has_loaded = set(), True

    def offload(self, cache: HostCache) -> None:
        """Deactivates all engines, which frees their devices. Raises: WorkerError; ConfigError."""
        if _leads():
            _each(EngineControl.deactivate, self._engines())

    def begin_timing(self) -> None:
        """Counts the engines' prompts from now on. Raises: WorkerError; ConfigError."""
        self._timing = EngineTiming([engines for _, engines in self._by_number()])

    def engine_times(self, max_tokens: int) -> EngineTimes:
        """Says how fast the engines are, after a rollout since `begin_timing`. Takes as long as
        `rose profile`. Raises: WorkerError."""
        assert self._timing is not None
        return self._timing.finish(max_tokens)

    def take_memory(self, share: float) -> None:
        """Bounds each engine's slabs by this share of the rollout budget of its pool, in which it has to be
        the job's only one. An engine that refuses, such as one in no pool, stays as it is, which the log
        says. Raises: ConfigError."""
        if _leads():
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
        with self._counting:  # a status must not be compared with a later one
            found = _each(lambda engine: engine.status(REPORT_S), engines)
            before, now = self._seen, {each.url: status for each, status in zip(engines, found, strict=True)}
            self._seen = before | now
        return [run_between([(before.get(each.url), now[each.url]) for each in node]) for node in nodes]

    def _engines(self) -> list[EngineControl]:
        return [engine for _, node in self._by_number() for engine in node]

    def _by_number(self) -> list[tuple[int, Sequence[EngineControl]]]:
        job = running_job()
        if job is None:
            return list(enumerate(self._nodes))
        before = self._places if job.group == self._group else {}
        hosts = [{httpx.URL(engine.url).host for engine in node} for node in self._nodes]
        self._group = job.group
        self._places = places(job.rollout_nodes, hosts, _addresses(job.file), before)
        return [(number, self._nodes[index]) for number, index in self._places.items()]


def places(
    numbers: Sequence[int],
    hosts: Sequence[Collection[str]],
    addresses: Mapping[int, str],
    before: Mapping[int, int],
) -> dict[int, int]:
    """Returns for each rollout node, by its number in the group, which engines are its own.

    A node keeps the engines that it had. If addresses tell, each other node has the engines at its address.
    Otherwise, if there are as many nodes as entries of engines, they have them in order; if there are fewer
    nodes, node i has the engines of index i if they are free. Raises: ConfigError.

    hosts: those of the engines at each index. addresses: of nodes. before: the places until now.
    """
    if len(numbers) > len(hosts):
        raise ConfigError(
            f"OwnEngines has engines for {len(hosts)} rollout nodes, and the job has {len(numbers)}; give "
            "the engines of each node that the job's file asks for"
        )
    found = {number: before[number] for number in numbers if number in before}
    says_so = any(address in host for address in addresses.values() for host in hosts)
    if not found and len(numbers) == len(hosts) and not says_so:
        return dict(zip(numbers, range(len(hosts)), strict=True))
    new = [number for number in numbers if number not in found]
    for number in sorted(new, key=lambda each: each >= len(hosts)):
        address = addresses.get(number) if says_so else None
        free = [
            index
            for index, host in enumerate(hosts)
            if index not in found.values() and (address is None or address in host)
        ]
        if not free:
            raise ConfigError(
                f"OwnEngines: rollout node {number} is at {address}, and no free engine of the job is there; "
                "give the engines of each host that the job may be on"
            )
        found[number] = number if number in free else free[0]
    return {number: found[number] for number in numbers}


def _addresses(file: JobFile) -> dict[int, str]:
    """Returns where the rollout nodes are, by their numbers; on one machine all are at the same place."""
    nodes = zip(file.rollout_nodes, file.nodes, strict=False)  # rollout nodes come first
    return {number: node.address for number, node in nodes if node.address != "127.0.0.1"}


def _leads() -> bool:
    """Whether this process is rank 0 of its job, or the only one."""
    job = running_job()
    return job is None or job.rank == 0


def _put_aside(engine: EngineControl) -> None:
    try:
        engine.deactivate()
    except WorkerError as error:  # its node is another job's now, or gone
        logger.info("an engine of a node that the job has handed back does not answer: %s", error)


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
    # An engine that was restarted may have another number of ranks.
    pairs = zip(before.ranks or [before], now.ranks or [now], strict=False)
    return [_rank_run(*pair) for pair in pairs]


def _rank_run(before: WorkerStatus, now: WorkerStatus) -> EngineRun:
    def more(name: str) -> float:
        # An engine that was restarted counts from 0.
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
