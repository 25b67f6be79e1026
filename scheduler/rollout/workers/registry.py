"""The set of rollout workers, and the heartbeats that watch them.

Owns: membership at run time, the heartbeats, the models and the newest weights of each run that they report.
Promises: a worker without a sign of life for `lost_after_s`, and for the time of two heartbeats, is dead, and
whatever runs on it is told at once. A worker is asked for its models before it becomes alive. Heartbeats of a
large fleet come less often, so that they leave the router's CPU to turns, and their answers stay valid for
proportionally longer. Few are under way at a time, so that a busy router does not take its own delay for a
worker's silence. Never does: place turns (placing/policy.py), keep a worker's state (worker.py).
"""

import asyncio
import contextlib
import logging
import math
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlencode

import aiohttp

from rose.errors import NoWorkerError, WorkerError
from rose.messages import RoutingStatus
from rose.scheduler.rollout.formats.bodies import Json
from rose.scheduler.rollout.placing.versions import NewestVersions
from rose.scheduler.rollout.router_config import MAX_WORKERS, RouterConfig, WorkerSpec
from rose.scheduler.rollout.workers.members import Members
from rose.scheduler.rollout.workers.models import (
    Catalogue,
    ModelCard,
    ModelCards,
    is_version,
    with_adapters,
)
from rose.scheduler.rollout.workers.wire import NotConnected, Wire
from rose.scheduler.rollout.workers.worker import Worker

logger = logging.getLogger(__name__)

_NO_ROSE_ROUTES = (404, 405, 501)
_CLOCK_S = 0.01
"""The event loop's timers may fire this much too early."""
_UPDATING_S = 0.05
"""The time between heartbeats of a worker that changes its weights or its job, for which turns wait."""
_CONTESTED_RATE = 4
"""How many times as often a worker is asked whose GPU another router has lent."""
_DUE_S = 0.005
"""What changes together is asked together."""
_MOST_PER_S = 2500.0
"""A heartbeat takes 0.1 to 0.3 ms of CPU. Without this bound, those of some thousand workers would leave none
to turns."""
_MOST_AT_ONCE = 256
_MAKES_ROOM_S = 0.5
"""A worker that is silent for this long holds up no other's heartbeat. If this were much shorter, a busy
router would begin more heartbeats than it can finish."""
_ROUND_S = 0.5
"""The time between two rounds of questions for which clients wait; more in a fleet of thousands."""
_MODELS_EVERY_S = 5.0
"""Engines load adapters while they run, so the models are asked for this often, in a large fleet as much more
seldom as heartbeats are."""


class Registry:
    """All workers, each with a heartbeat task."""

    def __init__(
        self,
        config: RouterConfig,
        http: aiohttp.ClientSession,
        wire: Wire,
        changed: Callable[[], None],
        num_waiting: Callable[[], int] = lambda: 0,
        is_waited_for: Callable[[Worker, str], bool] = lambda *_: False,
        priority_of: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """`num_waiting`: the turns that wait for a place. `is_waited_for`: whether turns of a job wait that
        may begin on a worker. `priority_of`: a job's priority."""
        self._config = config
        self._http = http
        self._wire = wire
        self._headers = "".join(f"{k}: {v}\r\n" for k, v in rose_headers(config).items()).encode()
        self._room = asyncio.Semaphore(_MOST_AT_ONCE)
        self._changed = changed
        self._num_waiting = num_waiting
        self._is_waited_for = is_waited_for
        self._priority_of = priority_of
        self._workers = Members()
        self._heartbeats: dict[str, asyncio.Task[None]] = {}
        self._next_round: asyncio.Task[None] | None = None
        """The questions to all workers that have not begun yet."""
        self._rounds: set[asyncio.Task[None]] = set()
        self._rounds_from = 0.0
        self.newest = NewestVersions()
        self.catalogue = Catalogue()
        self.name = f"router-{uuid.uuid4().hex}"
        """Engines wait until followers with a name know of new weights, because the router tags tokens
        with versions. Leases are by name, too."""

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def members(self) -> Members:
        """Returns all workers by id, as a live mapping that callers must not change."""
        return self._workers

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def add(self, spec: WorkerSpec) -> Worker:
        """Registers a worker and starts its heartbeat. It gets turns once it has answered one.

        Raises:
            ValueError: a worker with this address is registered already, or there are MAX_WORKERS.
        """
        if spec.id in self._workers:
            raise ValueError(f"worker {spec.id} is registered already")
        if len(self._workers) >= MAX_WORKERS:
            raise ValueError(
                f"{len(self._workers)} workers are registered, which is a router's limit; remove {spec.id} or"
                " others, or start another router for them"
            )
        worker = Worker(spec, self._config)
        self._workers.add(worker)
        self.catalogue.take(worker.id, None)
        self._wire.keep(worker.url)
        self._heartbeats[worker.id] = asyncio.create_task(self._watch(worker), name=f"heartbeat-{worker.id}")
        return worker

    def remove(self, worker_id: str) -> None:
        """Removes a worker, whose attempts are rerouted.

        Raises:
            KeyError: there is no such worker.
        """
        worker = self._workers.remove(worker_id)
        worker.is_removed = True
        self._heartbeats.pop(worker_id).cancel()
        self.catalogue.forget(worker_id)
        self._wire.forget(worker.url)
        worker.lost("removed")
        self._changed()

    async def close(self) -> None:
        tasks = [*self._heartbeats.values(), *self._rounds]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, worker: Worker) -> None:
        is_failing, phase = False, random.random()
        while True:
            started = time.monotonic()
            try:
                async with self._begun():
                    await self.beat(worker)
                self._changed()
                is_failing = False
            except Exception as error:  # without heartbeats the worker would seem alive for ever
                if not is_failing:  # once, and not twice a second
                    logger.exception("heartbeat failed, and goes on worker=%s", worker.id)
                is_failing = True
                if self._is_silent(worker):
                    worker.lost(f"{type(error).__name__}: {error}")
            every_s = self._every_s / (_CONTESTED_RATE if worker.is_contested else 1)
            every_s = min(every_s, _UPDATING_S if worker.is_hurried else math.inf)
            every_s, phase = phase * every_s, 1.0  # or workers that came together would always be asked so
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, every_s - (time.monotonic() - started))):
                    await worker.is_due.wait()
                    await asyncio.sleep(_DUE_S)

    @property
    def _every_s(self) -> float:
        """The time between two heartbeats of a worker."""
        return max(self._config.heartbeat_s, len(self._workers) / _MOST_PER_S)

    @property
    def _models_every_s(self) -> float:
        return _MODELS_EVERY_S * self._every_s / self._config.heartbeat_s

    @contextlib.asynccontextmanager
    async def _begun(self) -> AsyncIterator[None]:
        """Waits until a heartbeat may begin. It counts until its end, or until it has taken too long."""
        await self._room.acquire()
        is_counted = True

        def leave() -> None:  # called twice: the loop's clock does not tell whether a timer has run
            nonlocal is_counted
            if is_counted:
                is_counted = False
                self._room.release()

        timer = asyncio.get_running_loop().call_later(_MAKES_ROOM_S, leave)
        try:
            yield
        finally:
            timer.cancel()
            leave()

    def router_gone(self, name: str) -> None:
        """Tells all workers at once that another router has died, whose leases they may give to others."""
        for worker in self._workers.values():
            worker.gone_routers.add(name)
            worker.is_due.set()

    def router_lives(self, name: str) -> None:
        """Takes back the news that a router had died, for the workers that have not been told yet."""
        for worker in self._workers.values():
            worker.gone_routers.discard(name)

    async def beat(self, worker: Worker) -> None:
        """Asks one worker for its status, and notes the answer or its absence."""
        worker.is_due.clear()
        try:
            status = await self._ask_status(worker)
            if status is not None:
                self._take_status(worker, status)
            else:
                worker.without_lease()
            if not worker.is_alive:  # before it gets turns, since it may be another engine than before
                self._take_models(worker, await self._ask_models(worker))
            worker.seen(time.monotonic())
            # While this worker changes its weights, others may go on with the previous version.
            if worker.weight_version is not None and worker.view().alive:
                models = worker.models.keys() - worker.adapters.keys() if worker.models is not None else None
                self.newest.heard(worker.weight_version, models, now=time.monotonic())
            for adapter in worker.adapters.values():
                self.newest.heard_adapter(adapter, now=time.monotonic())
            if time.monotonic() - worker.models_asked_at > self._models_every_s:
                await self._refresh(worker)
        except (aiohttp.ClientError, OSError, ValueError, WorkerError) as error:
            if isinstance(error, aiohttp.ClientConnectorError | NotConnected) or self._is_silent(worker):
                worker.lost(f"{type(error).__name__}: {error}")
                worker.has_rose_routes = True

    def _is_silent(self, worker: Worker) -> bool:
        """Whether nothing that could be understood has come for `lost_after_s`."""
        return worker.last_seen is None or time.monotonic() - worker.last_seen > self._lost_after_s

    @property
    def _lost_after_s(self) -> float:
        """A worker of a very large fleet is asked seldom, and one question may fail."""
        return max(self._config.lost_after_s, 2 * self._every_s)

    def _take_status(self, worker: Worker, status: RoutingStatus) -> None:
        before, lease, models = worker.holder, worker.lease, worker.models
        could_get = (worker.follows_loans, worker.refused_runs, worker.base_for)
        worker.take_status(status, now := time.monotonic(), self._every_s)
        for divide in worker.dividing:
            divide(worker.id, worker.num_routers, now)
        if worker.models is not models and self._workers.get(worker.id) is worker:
            self.catalogue.take(worker.id, worker.models)
        if lease is not None and worker.lease is not None and worker.lease.turns < lease.turns:
            worker.is_due.set()  # others get the rest when it is known here
        if worker.holder not in (before, worker.owner):
            self._workers.num_contests += 1  # another router has lent the GPU
        if could_get != (worker.follows_loans, worker.refused_runs, worker.base_for):
            self._workers.num_contests += 1  # other jobs can use it now

    async def refresh_models(self) -> None:
        """Asks all live workers which models they serve, and which adapters they hold. Clients with a
        wrong name may cause many rounds, so one begins every _ROUND_S at most, for all clients that wait."""
        if self._next_round is None:
            self._next_round = asyncio.create_task(self._round())
            self._rounds.add(self._next_round)
            self._next_round.add_done_callback(self._rounds.discard)
        await asyncio.shield(self._next_round)

    async def _round(self) -> None:
        await asyncio.sleep(self._rounds_from - time.monotonic())
        pause_s = max(_ROUND_S, len(self._workers) / _MOST_PER_S)
        self._next_round, self._rounds_from = None, time.monotonic() + pause_s
        alive = [worker for worker in self.workers() if worker.is_alive]
        await asyncio.gather(*(self._refresh(worker) for worker in alive))
        holders = [each for each in alive if each.status is not None and each.status.adapters is not None]
        await asyncio.gather(*(self.beat(worker) for worker in holders))

    async def _refresh(self, worker: Worker) -> None:
        """Asks a worker for its models, and keeps the known ones if there is no answer."""
        try:
            if cards := await self._ask_models(worker):
                self._take_models(worker, cards)
        except OSError as error:
            logger.warning("no models worker=%s error=%s", worker.id, type(error).__name__)

    def _take_models(self, worker: Worker, cards: list[ModelCard]) -> None:
        """Notes a worker's models; no cards mean that it does not say."""
        worker.cards = cards
        models = {card.id: card.max_model_len for card in cards} if cards else None
        if models == worker.said_models or self._workers.get(worker.id) is not worker:
            return
        before, shown = worker.models, with_adapters(models, worker.adapters)
        worker.said_models = models
        if shown != before:  # and not only the loaded versions of an adapter
            logger.info("worker=%s models=%s", worker.id, list(models or ()))
            worker.says_models(models)
            self.catalogue.take(worker.id, worker.models)

    def model_cards(self) -> list[Json]:
        """Returns each model once, as the first worker with its longest context shows it, lost workers
        included."""
        cards: dict[str, Json] = {}
        for worker in self._workers.values():
            for card in worker.cards:
                known = cards.get(card.id)
                is_longer = known is None or (card.max_model_len or 0) > (known.get("max_model_len") or 0)
                if is_longer and not is_version(card.id, worker.adapters):
                    cards[card.id] = card.as_json()
            parent = worker.cards[0].id if worker.cards else None
            for run_id in worker.adapters:
                cards.setdefault(run_id, {"id": run_id, "object": "model", "parent": parent})
        return list(cards.values())

    def base_of(self, model: str | None) -> str | None:
        """Returns the model whose chat template and tokens a model has: the base of a LoRA adapter, otherwise
        the model itself. Raises: NoWorkerError if no worker holds the adapter."""
        if not self.newest.is_adapter(model):
            return model
        for worker in self._workers.values():
            if model in worker.adapters and worker.cards:
                return worker.cards[0].id
        raise NoWorkerError(f"no worker holds the LoRA adapter {model}")

    async def _ask_models(self, worker: Worker) -> list[ModelCard]:
        """Returns the worker's models; none if it lacks the route or answers in another shape."""
        worker.models_asked_at = time.monotonic()
        async with asyncio.timeout(self._config.lost_after_s):
            code, data = await self._get(worker, "/v1/models", worker.openai_headers)
        if code != 200:
            return []
        try:
            return ModelCards.model_validate_json(data).data
        except ValueError:
            return []

    def _patience_s(self, worker: Worker) -> float:
        """Returns how long to wait for an answer: until the worker counts as lost, but not twice that
        long."""
        if worker.last_seen is None:
            return self._lost_after_s
        left_s = worker.last_seen + self._lost_after_s - time.monotonic()
        return max(self._config.heartbeat_s, left_s + _CLOCK_S)

    async def _ask_status(self, worker: Worker) -> RoutingStatus | None:
        """Returns the worker's status; None from a stock vLLM, which only has /health."""
        patience_s = self._patience_s(worker)
        if worker.has_rose_routes:
            asked = self._question(worker)
            path = f"/rose/v1/status?{urlencode(asked, doseq=True)}"
            async with asyncio.timeout(patience_s):
                code, data = await self._get(worker, path, self._headers)
            if code == 200:
                status = RoutingStatus.model_validate_json(data)
                worker.told_gone(asked.get("gone"))
                return status
            if code not in _NO_ROSE_ROUTES:
                raise WorkerError(f"{worker.spec.url}/rose/v1/status answered {code}")
            worker.has_rose_routes = False
            logger.info("worker has no /rose/v1, using /health worker=%s", worker.id)
        timeout = aiohttp.ClientTimeout(total=patience_s)
        async with self._http.get(f"{worker.spec.url}/health", timeout=timeout) as response:
            if response.status != 200:
                raise WorkerError(f"{worker.spec.url}/health answered {response.status}")
        return None

    async def _get(self, worker: Worker, path: str, headers: bytes) -> tuple[int, bytes]:
        return await self._wire.get(worker.url, worker.url.raw_path.rstrip("/") + path, headers)

    def _question(self, worker: Worker) -> dict[str, Any]:
        """Returns what a worker is told with the question for its status (Lease, Followers)."""
        told: dict[str, Any] = {"follower": self.name, "every_s": str(self._every_s)}
        known = [worker.weight_version] if worker.weight_version is not None else []
        # The weights come last: an engine that expects a single version takes the last one.
        told["knows"] = [str(version) for version in (*worker.adapters.values(), *known)]
        told |= {"cap": worker.cap, "wants": worker.in_flight + self._num_waiting()}
        if owner := worker.owner:
            is_needed = worker.tenants[owner] > 0 or self._is_waited_for(worker, owner)
            told |= {"lends": owner, "needs": int(is_needed), "priority": self._priority_of(owner)}
            told |= {"run": worker.lent_run} if worker.lent_run is not None else {}
        if worker.gone_routers:
            told["gone"] = min(worker.gone_routers)
        return told


def rose_headers(config: RouterConfig) -> dict[str, str]:
    return {"Authorization": f"Bearer {config.rose_key}"} if config.rose_key is not None else {}


def openai_headers(config: RouterConfig) -> dict[str, str]:
    return {"Authorization": f"Bearer {config.worker_api_key}"} if config.worker_api_key is not None else {}
