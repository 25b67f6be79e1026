"""The set of rollout workers: who is there, and how they are.

Owns: membership at run time, the heartbeats, what they tell of models and of each run's newest weights.
Promises: a worker that shows no sign of life for `lost_after_s` is dead, and what runs on it is told at once.
One that is alive has been asked which models it serves.
Never does: place turns (policy.py), keep a worker's state (worker.py).
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping

import aiohttp

from rose.errors import WorkerError
from rose.messages import RoutingStatus
from rose.scheduler.rollout.formats.bodies import Json
from rose.scheduler.rollout.placing.versions import NewestVersions
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.workers.models import Catalogue, ModelCard, ModelCards
from rose.scheduler.rollout.workers.worker import Worker

logger = logging.getLogger(__name__)

_NO_ROSE_ROUTES = (404, 405, 501)
_CLOCK_S = 0.01
"""The event loop's timers may be early by so much."""
_UPDATING_S = 0.05
"""Between heartbeats of a worker that changes its weights: turns wait for its new version."""
_MODELS_EVERY_S = 5.0
"""Adapters are loaded while engines run, and turns that name one may go to each that has it."""


class Registry:
    """The set of workers and one heartbeat task for each."""

    def __init__(
        self, config: RouterConfig, http: aiohttp.ClientSession, changed: Callable[[], None]
    ) -> None:
        self._config = config
        self._http = http
        self._changed = changed
        self._workers: dict[str, Worker] = {}
        self._heartbeats: dict[str, asyncio.Task[None]] = {}
        self.newest = NewestVersions()
        self.catalogue = Catalogue()
        self._name = f"router-{uuid.uuid4().hex}"
        """Engines wait until those who ask by name know of new weights: tokens are tagged by what we know."""

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def members(self) -> Mapping[str, Worker]:
        """All workers by id; not to be changed."""
        return self._workers

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def add(self, spec: WorkerSpec) -> Worker:
        """Register a worker and start its heartbeat; it takes turns once it answered one.

        Raises:
            ValueError: a worker of that address is registered already.
        """
        if spec.id in self._workers:
            raise ValueError(f"worker {spec.id} is registered already")
        worker = Worker(spec, self._config)
        self._workers[worker.id] = worker
        self.catalogue.take(worker.id, None)
        self._heartbeats[worker.id] = asyncio.create_task(self._watch(worker), name=f"heartbeat-{worker.id}")
        return worker

    def remove(self, worker_id: str) -> None:
        """Forget a worker; its attempts are rerouted.

        Raises:
            KeyError: no such worker.
        """
        worker = self._workers.pop(worker_id)
        self._heartbeats.pop(worker_id).cancel()
        self.catalogue.forget(worker_id)
        worker.lost("removed")
        self._changed()

    async def close(self) -> None:
        tasks = list(self._heartbeats.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, worker: Worker) -> None:
        while True:
            started = time.monotonic()
            await self.beat(worker)
            self._changed()
            every_s = min(self._config.heartbeat_s, _UPDATING_S if worker.is_updating else math.inf)
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - started)))

    async def beat(self, worker: Worker) -> None:
        """Ask one worker how it is, and take down the answer or its absence."""
        try:
            status = await self._ask_status(worker)
            if status is not None:
                worker.take_status(status, time.monotonic())
            if not worker.is_alive:  # before it gets turns: it may not be the engine that it was
                self._take_models(worker, await self._ask_models(worker))
            worker.seen(time.monotonic())
            # Others may go on with the version before while this worker still changes to its next one.
            if worker.weight_version is not None and worker.view().alive:
                self.newest.heard(worker.weight_version, worker.models)
            if time.monotonic() - worker.models_asked_at > _MODELS_EVERY_S:
                await self._refresh(worker)
        except (aiohttp.ClientError, TimeoutError, ValueError, WorkerError) as error:
            now = time.monotonic()
            is_refused = isinstance(error, aiohttp.ClientConnectorError)
            if is_refused or worker.last_seen is None or now - worker.last_seen > self._config.lost_after_s:
                worker.lost(f"{type(error).__name__}: {error}")
                worker.has_rose_routes = True

    async def refresh_models(self) -> None:
        """Ask all live workers which models they serve."""
        await asyncio.gather(*(self._refresh(worker) for worker in self.workers() if worker.is_alive))

    async def _refresh(self, worker: Worker) -> None:
        """What it said before stands while it says nothing else."""
        try:
            if cards := await self._ask_models(worker):
                self._take_models(worker, cards)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("no models worker=%s error=%s", worker.id, type(error).__name__)

    def _take_models(self, worker: Worker, cards: list[ModelCard]) -> None:
        """No card: it does not say."""
        worker.cards = cards
        models = {card.id: card.max_model_len for card in cards} if cards else None
        if models != worker.models and self._workers.get(worker.id) is worker:
            logger.info("worker=%s models=%s", worker.id, list(models or ()))
            worker.says_models(models)
            self.catalogue.take(worker.id, models)

    def model_cards(self) -> list[Json]:
        """Each model once, as the first worker that serves it shows it; those of lost workers, too."""
        cards: dict[str, Json] = {}
        for worker in self._workers.values():
            for card in worker.cards:
                cards.setdefault(card.id, card.as_json())
        return list(cards.values())

    async def _ask_models(self, worker: Worker) -> list[ModelCard]:
        """The cards it shows; none where it doesn't have that route, or another shape of it."""
        worker.models_asked_at = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=self._config.lost_after_s)
        url, headers = f"{worker.spec.url}/v1/models", openai_headers(self._config)
        async with self._http.get(url, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                return []
            data = await response.read()
        try:
            return ModelCards.model_validate_json(data).data
        except ValueError:
            return []

    def _patience_s(self, worker: Worker) -> float:
        """The time to wait for an answer: until the worker counts as lost, and not for a second such time."""
        if worker.last_seen is None:
            return self._config.lost_after_s
        left_s = worker.last_seen + self._config.lost_after_s - time.monotonic()
        return max(self._config.heartbeat_s, left_s + _CLOCK_S)

    async def _ask_status(self, worker: Worker) -> RoutingStatus | None:
        """The worker's status; None from a stock vLLM, which only has /health."""
        timeout = aiohttp.ClientTimeout(total=self._patience_s(worker))
        if worker.has_rose_routes:
            url = f"{worker.spec.url}/rose/v1/status"
            follows = {"follower": self._name, "every_s": str(self._config.heartbeat_s)}
            if worker.weight_version is not None:
                follows["knows"] = str(worker.weight_version)
            headers = rose_headers(self._config)
            async with self._http.get(url, params=follows, headers=headers, timeout=timeout) as response:
                if response.status == 200:
                    return RoutingStatus.model_validate(await response.json())
                if response.status not in _NO_ROSE_ROUTES:
                    raise WorkerError(f"{url} answered {response.status}")
                worker.has_rose_routes = False
                logger.info("worker has no /rose/v1, using /health worker=%s", worker.id)
        async with self._http.get(f"{worker.spec.url}/health", timeout=timeout) as response:
            if response.status != 200:
                raise WorkerError(f"{worker.spec.url}/health answered {response.status}")
        return None


def rose_headers(config: RouterConfig) -> dict[str, str]:
    return {"Authorization": f"Bearer {config.rose_key}"} if config.rose_key is not None else {}


def openai_headers(config: RouterConfig) -> dict[str, str]:
    return {"Authorization": f"Bearer {config.worker_api_key}"} if config.worker_api_key is not None else {}
