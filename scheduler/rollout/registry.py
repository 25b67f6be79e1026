"""The rollout workers: who is there, how they are, what they hold.

Owns: Worker (one engine's state as the router sees it), Registry (membership at run time), the heartbeats.
Promises: a worker that shows no sign of life for `lost_after_s` is dead, and what runs on it is told at once;
a worker that returns or stalled is on probation (one turn at a time) until it makes a token.
Never does: place turns (policy.py), speak /v1 (attempt.py).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Self

import aiohttp
from pydantic import BaseModel, ConfigDict

from rose.errors import WorkerError
from rose.scheduler.rollout.config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.policy import WorkerView
from rose.types import WeightVersion

logger = logging.getLogger(__name__)

_INTERVALS_PER_STALL = 4
"""A worker's chunk has to come well within the stall time even when the gate slows its steps."""
_GRACE_FOR_OWN_REPORT = 1.5
_NO_ROSE_ROUTES = (404, 405, 501)


class GateStatus(BaseModel):
    model_config = ConfigDict(extra="allow")
    mode: str = ""
    admitted_steps: int = 0
    declined_steps: int = 0
    share: float = 1.0


class WorkerStatus(BaseModel):
    """GET /rose/v1/status, as far as routing needs it. Unknown fields are kept and shown."""

    model_config = ConfigDict(extra="allow")
    weight_version: str | None = None
    num_running: int = 0
    num_waiting: int = 0
    pressure: str | None = None
    gate: GateStatus | None = None
    is_active: bool = True
    """False: its weights are off the GPU until the next rollout phase, and it refuses turns."""


def parse_version(text: str | None) -> WeightVersion | None:
    """'run/7' -> WeightVersion; None stays None.

    Raises:
        WorkerError: not of the form run/number.
    """
    if text is None:
        return None
    run_id, _, number = text.rpartition("/")
    if not run_id or not number.isdigit():
        raise WorkerError(f"weight version {text!r}: want RUN/NUMBER")
    return WeightVersion(run_id=run_id, number=int(number))


class Watch:
    """The stall clock of something that runs on a worker; runs out at once when the worker is lost.

    Use: `with Watch(worker) as watch: async with watch.allow(seconds): await ...`, which raises TimeoutError.
    """

    def __init__(self, worker: "Worker") -> None:
        self.worker = worker
        self.is_lost = False
        self._clock: asyncio.Timeout | None = None

    def __enter__(self) -> Self:
        self.worker.watches.add(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.worker.watches.discard(self)
        self._clock = None

    def allow(self, seconds: float) -> asyncio.Timeout:
        self._clock = asyncio.timeout(0.0 if self.is_lost else seconds)
        return self._clock

    def worker_lost(self) -> None:
        self.is_lost = True
        if self._clock is not None:
            self._clock.reschedule(asyncio.get_running_loop().time())


class Worker:
    """One rollout engine. Changed only on the router's event loop."""

    def __init__(self, spec: WorkerSpec, config: RouterConfig) -> None:
        self.spec = spec
        self.id = spec.id
        self.cap = config.turns_per_gpu * spec.gpus
        self.is_alive = False
        self.is_active = True
        self.is_on_probation = False
        self.has_rose_routes = True
        self.last_seen: float | None = None
        self.cooldown_until = 0.0
        self.status: WorkerStatus | None = None
        self.weight_version: WeightVersion | None = None
        self.is_gate_declining = False
        self.has_yielded = False
        self.problem: str | None = None
        self.in_flight = 0
        self.watches: set[Watch] = set()
        self.num_tokens = 0
        self.num_turns = 0
        self.seconds_per_token: float | None = None

    @property
    def is_eligible(self) -> bool:
        """On a serving GPU: no memory pressure, the gate lets steps through, nothing waits there already."""
        status = self.status
        if self.has_yielded or self.is_gate_declining:
            return False
        if status is None:
            return True
        return (status.pressure or "").lower() != "pressure" and status.num_waiting == 0

    def view(self) -> WorkerView:
        cap = 1 if self.is_on_probation else self.cap
        return WorkerView(
            id=self.id,
            kind=self.spec.kind,
            alive=self.is_alive and self.is_active,
            in_flight=self.in_flight,
            cap=cap,
            eligible=self.is_eligible,
            weight_version=self.weight_version,
            load=self.in_flight / self.cap,
            not_before=self.cooldown_until,
        )

    def stream_interval(self, config: RouterConfig) -> int:
        """Tokens per chunk: few enough that slow steps don't look like a stall."""
        if self.seconds_per_token is None:
            return 1
        fitting = int(config.stall_s / _INTERVALS_PER_STALL / max(self.seconds_per_token, 1e-6))
        return max(1, min(config.stream_interval, fitting))

    def stall_allowance_s(self, config: RouterConfig) -> float:
        """The time without a token that is a stall. An engine with ROSE may report its own first."""
        return config.stall_s * (_GRACE_FOR_OWN_REPORT if self.has_rose_routes else 1.0)

    def made_tokens(self, num_tokens: int, now: float, took_s: float | None) -> None:
        """Progress is the proof of life that counts: it ends a probation.

        `took_s`: since the tokens before; None for the first of an attempt, which wait for the prefill.
        """
        self.num_tokens += num_tokens
        self.last_seen = now
        self.is_on_probation = False
        if took_s is None:
            return
        per_token = took_s / num_tokens
        known = self.seconds_per_token
        self.seconds_per_token = per_token if known is None else 0.8 * known + 0.2 * per_token

    def suspect(self, now: float, config: RouterConfig) -> None:
        """It failed or stalled a turn: no new ones for a moment, then one at a time."""
        self.cooldown_until = now + config.avoid_s
        self.is_on_probation = True

    def take_status(self, status: WorkerStatus) -> None:
        self.weight_version = parse_version(status.weight_version)
        before, gate = self.status.gate if self.status is not None else None, status.gate
        self.is_gate_declining = (
            before is not None
            and gate is not None
            and gate.declined_steps > before.declined_steps
            and gate.admitted_steps == before.admitted_steps
        )
        self.has_yielded = False
        if status.is_active != self.is_active:
            logger.info("worker active=%s worker=%s", status.is_active, self.id)
        self.is_active = status.is_active
        self.status = status

    def seen(self, now: float) -> None:
        self.last_seen = now
        self.problem = None
        if not self.is_alive:
            logger.info("worker alive worker=%s kind=%s", self.id, self.spec.kind)
            self.is_alive = True

    def lost(self, reason: str) -> None:
        """Mark it dead and tell everything that runs on it."""
        if self.is_alive:
            logger.warning("worker lost worker=%s in_flight=%d reason=%s", self.id, self.in_flight, reason)
            self.is_on_probation = True
        elif self.problem is None:
            logger.warning("worker not reachable worker=%s reason=%s", self.id, reason)
        self.problem = reason
        self.is_alive = False
        for watch in self.watches:
            watch.worker_lost()

    def as_json(self, now: float) -> dict[str, Any]:
        view = self.view()
        return {
            "id": self.id,
            "url": self.spec.url,
            "kind": self.spec.kind.value,
            "alive": self.is_alive,
            "active": self.is_active,
            "problem": self.problem,
            "on_probation": self.is_on_probation,
            "eligible": view.eligible,
            "in_flight": self.in_flight,
            "cap": self.cap,
            "weight_version": str(self.weight_version) if self.weight_version is not None else None,
            "seen_s_ago": round(now - self.last_seen, 3) if self.last_seen is not None else None,
            "turns": self.num_turns,
            "tokens": self.num_tokens,
            "status": self.status.model_dump() if self.status is not None else None,
        }


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

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

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
            await asyncio.sleep(max(0.0, self._config.heartbeat_s - (time.monotonic() - started)))

    async def beat(self, worker: Worker) -> None:
        """Ask one worker how it is, and take down the answer or its absence."""
        try:
            status = await self._ask_status(worker)
            if status is not None:
                worker.take_status(status)
            worker.seen(time.monotonic())
        except (aiohttp.ClientError, TimeoutError, ValueError, WorkerError) as error:
            now = time.monotonic()
            is_refused = isinstance(error, aiohttp.ClientConnectorError)
            if is_refused or worker.last_seen is None or now - worker.last_seen > self._config.lost_after_s:
                worker.lost(f"{type(error).__name__}: {error}")
                worker.has_rose_routes = True

    async def _ask_status(self, worker: Worker) -> WorkerStatus | None:
        """The worker's status; None from a stock vLLM, which only has /health."""
        timeout = aiohttp.ClientTimeout(total=self._config.lost_after_s)
        if worker.has_rose_routes:
            url = f"{worker.spec.url}/rose/v1/status"
            async with self._http.get(url, headers=rose_headers(self._config), timeout=timeout) as response:
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
