"""The set of rollout workers: who is there, and how they are.

Owns: membership at run time, the heartbeats, what they tell of each training run's newest weights.
Promises: a worker that shows no sign of life for `lost_after_s` is dead, and what runs on it is told at once.
Never does: place turns (policy.py), keep a worker's state (worker.py).
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping

import aiohttp
from pydantic import BaseModel

from rose.errors import WorkerError
from rose.scheduler.rollout.config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.status import WorkerStatus
from rose.scheduler.rollout.versions import NewestVersions
from rose.scheduler.rollout.worker import Worker

logger = logging.getLogger(__name__)

_NO_ROSE_ROUTES = (404, 405, 501)
_CLOCK_S = 0.01
"""The event loop's timers may be early by so much."""
_UPDATING_S = 0.05
"""Between heartbeats of a worker that changes its weights: turns wait for its new version."""


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None


class _Models(BaseModel):
    data: list[_Model]


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
        self._heartbeats[worker.id] = asyncio.create_task(self._watch(worker), name=f"heartbeat-{worker.id}")
        return worker

    def remove(self, worker_id: str) -> None:
        """Forget a worker; its attempts are rerouted.

        Raises:
            KeyError: no such worker.
        """
        worker = self._workers.pop(worker_id)
        self._heartbeats.pop(worker_id).cancel()
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
            worker.seen(time.monotonic())
            # Others may go on with the version before while this worker still changes to its next one.
            if worker.weight_version is not None and worker.view().alive:
                self.newest.heard(worker.weight_version)
            if worker.models is None:
                worker.models = await self._ask_models(worker)
        except (aiohttp.ClientError, TimeoutError, ValueError, WorkerError) as error:
            now = time.monotonic()
            is_refused = isinstance(error, aiohttp.ClientConnectorError)
            if is_refused or worker.last_seen is None or now - worker.last_seen > self._config.lost_after_s:
                worker.lost(f"{type(error).__name__}: {error}")
                worker.has_rose_routes = True
                worker.models = None

    async def refresh_models(self) -> None:
        """Ask all live workers which models they serve."""
        alive = [worker for worker in self._workers.values() if worker.is_alive]
        asked = await asyncio.gather(*(self._ask_models(w) for w in alive), return_exceptions=True)
        for worker, models in zip(alive, asked, strict=True):
            worker.models = models if isinstance(models, dict) else None

    async def _ask_models(self, worker: Worker) -> dict[str, int | None] | None:
        """Model name -> context; None where it doesn't say."""
        timeout = aiohttp.ClientTimeout(total=self._config.lost_after_s)
        url, headers = f"{worker.spec.url}/v1/models", openai_headers(self._config)
        async with self._http.get(url, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                return None
            return {
                card.id: card.max_model_len for card in _Models.model_validate(await response.json()).data
            }

    def _patience_s(self, worker: Worker) -> float:
        """The time to wait for an answer: until the worker counts as lost, and not for a second such time."""
        if worker.last_seen is None:
            return self._config.lost_after_s
        left_s = worker.last_seen + self._config.lost_after_s - time.monotonic()
        return max(self._config.heartbeat_s, left_s + _CLOCK_S)

    async def _ask_status(self, worker: Worker) -> WorkerStatus | None:
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
                    return WorkerStatus.model_validate(await response.json())
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
