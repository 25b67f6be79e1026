"""A turn's way through the router: pick, stream, reroute when cut, merge.

Owns: the loop of attempts of one single request, and what an attempt's failure means for its worker.
Promises: a turn ends with exactly one answer or one error; nothing it used stays taken, also when the client
leaves.
Never does: parse HTTP of clients (service.py), decide placement (policy.py).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import aiohttp

from rose.errors import RoseError, WorkerError
from rose.scheduler.rollout.formats.completions import Call, Single
from rose.scheduler.rollout.formats.resume import Accumulated, Chunk
from rose.scheduler.rollout.placing.cost import CostPolicy
from rose.scheduler.rollout.placing.policy import PaperPolicy, PinnedPolicy, TurnwisePolicy
from rose.scheduler.rollout.placing.versions import VersionMode, VersionRule
from rose.scheduler.rollout.placing.views import Policy
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.aborts import abortable
from rose.scheduler.rollout.turn.attempt import Attempt
from rose.scheduler.rollout.turn.boundary import decoder, end_on_character
from rose.scheduler.rollout.turn.counters import Counters
from rose.scheduler.rollout.turn.dispatch import Dispatcher
from rose.scheduler.rollout.turn.endings import Ending, EndKind
from rose.scheduler.rollout.turn.jobs import JobTable
from rose.scheduler.rollout.turn.journey import Journey, Refused, Route
from rose.scheduler.rollout.turn.latencies import Latencies
from rose.scheduler.rollout.turn.placement import Place
from rose.scheduler.rollout.turn.traces import open_traces
from rose.scheduler.rollout.turn.trajectories import Trajectories, about_tokens
from rose.scheduler.rollout.turn.wire import Wire
from rose.scheduler.rollout.workers.registry import Registry
from rose.scheduler.rollout.workers.worker import Worker
from rose.types import WeightVersion

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives a streamed answer as it is generated."""

    async def chunk(self, single: Single, chunk: Chunk, model: str | None) -> None: ...

    async def end(self, single: Single, model: str | None) -> None: ...


_WORKERS_FAULT = (EndKind.STALLED, EndKind.LOST, EndKind.FAILED)
_YIELDS = (EndKind.RECLAIMED, EndKind.ENGINE_STALL)
"""The GPU's serving side needs it: no new turns before the next heartbeat says otherwise."""
_COUNTED_FAILURES = (EndKind.LOST, EndKind.FAILED)
_FINISHED = "finished"

POLICIES: Mapping[str, Callable[..., Policy]] = {
    "paper": PaperPolicy,
    "cost": CostPolicy,
    "turnwise": TurnwisePolicy,
    "pinned": PinnedPolicy,
}


class DataPlane:
    """Runs turns. Lives on the router's event loop."""

    def __init__(self, config: RouterConfig, http: aiohttp.ClientSession) -> None:
        self.config = config
        self.http = http
        self.wire = Wire()
        self.counters = Counters()
        self.latencies = Latencies()
        self.registry = Registry(config, http, self._workers_changed)
        self.jobs = JobTable(config)
        self.versions = self._rule(config.version_mode, config.max_lag)
        policy = POLICIES[config.policy](versions=self.versions)
        self.dispatcher = Dispatcher(self.registry, policy, self.jobs, config.max_queued_per_job)
        self.trajectories = Trajectories(config, self.registry, self.jobs)
        self.traces = open_traces(config.otlp_endpoint) if config.otlp_endpoint is not None else None

    def _workers_changed(self) -> None:
        self.dispatcher.pump()

    def abort(self, job_name: str | None) -> int:
        """End all requests of a job, or of all jobs; how many there were."""
        aborts = [abort for job in self.jobs if job_name in (None, job.name) for abort in job.aborts]
        for abort in aborts:
            abort()
        return len(aborts)

    def _rule(self, mode: VersionMode, max_lag: int) -> VersionRule:
        return VersionRule(mode=mode, max_lag=max_lag, known=self.registry.newest)

    def set_versions(self, mode: VersionMode, max_lag: int) -> None:
        """Place turns by another rule of versions from now on."""
        self.versions = self._rule(mode, max_lag)
        self.dispatcher.set_policy(POLICIES[self.config.policy](versions=self.versions))

    async def complete(self, call: Call, route: Route, sink: Sink | None) -> str | None:
        """Run all single requests of a call; the answers are in their generations. Returns the model's name.

        Raises:
            the first single's error; the others are cancelled.
        """
        async with abortable(self.jobs.get(route.job, time.monotonic())):
            if len(call.singles) == 1:  # the common case: no task of its own
                return await self._run_single(call.singles[0], 1, route, sink)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._run_single(single, len(call.singles), route, sink))
                        for single in call.singles
                    ]
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            return tasks[0].result()

    async def _run_single(
        self, single: Single, num_singles: int, route: Route, sink: Sink | None
    ) -> str | None:
        key = self.trajectories.key(single, num_singles, route)
        journey = self.traced(Journey(session=key, route=route, max_tokens=single.generation.max_tokens))
        result = "cancelled"
        try:
            model = await self._attempt_until_done(single, journey, sink)
            if sink is not None:
                await sink.end(single, model)
            result = _FINISHED
            return model
        except RoseError as error:
            result = type(error).__name__
            raise
        finally:
            self.ended(journey, result, single.generation)

    def traced(self, journey: Journey) -> Journey:
        """With a span, where turns are traced; whoever asks ends it."""
        if self.traces is not None:
            route = journey.route
            journey.span = self.traces.begin(route.job, journey.session, route.trace_parent)
        return journey

    def ended(self, journey: Journey, result: str, generation: Accumulated | None = None) -> None:
        """Take down what became of a request; `result`: finished, cancelled, or the error's name."""
        self.counters.turns[result] += 1
        model, num_tokens = journey.route.model, generation.num_tokens if generation is not None else 0
        known = model if model in self.registry.catalogue else None
        is_finished = result == _FINISHED
        self.latencies.ended(journey, known, time.monotonic(), num_tokens, is_finished=is_finished)
        if journey.span is not None:
            journey.span.end(result, generation)

    async def _attempt_until_done(self, single: Single, journey: Journey, sink: Sink | None) -> str | None:
        generation = single.generation
        model: str | None = None
        while not generation.is_exhausted:
            self._begin(single, is_streamed=sink is not None)
            first = generation.spans[0].weight_version if generation.spans else None
            journey.prompt_tokens = about_tokens(single.prompt) + generation.num_tokens
            place = await self.acquire(journey, first)
            worker, before = place.worker, generation.num_tokens
            try:
                ending, model = await self._attempt(single, place, journey, sink)
            finally:
                self.dispatcher.release(place, generation.num_tokens - before)
            if ending.kind is EndKind.FINISHED:
                generation.finish(ending.finish_reason, ending.stop_reason)
                self.trajectories.ended(single, journey, worker)
                self.jobs.get(journey.route.job, time.monotonic()).turn_ended(generation.num_tokens)
                return model
            self.rerouted(ending, worker, journey)
        generation.finish("length", None)
        return model

    def _begin(self, single: Single, is_streamed: bool) -> None:
        """Open the next epoch: resume where the last attempt was cut, or begin anew."""
        generation, num_tokens = single.generation, single.generation.num_tokens
        if is_streamed and num_tokens and generation.must_restart:
            raise WorkerError(
                "cut after tokens were streamed; what stop strings, structured output and parsers did so far"
                " can't be carried on"
            )
        restarts = generation.num_restarts
        generation.begin()
        if not num_tokens:
            return
        if generation.num_restarts > restarts:
            self.counters.restarted += 1
            self.counters.tokens_dropped += num_tokens
        else:
            self.counters.resumed += 1
            self.counters.tokens_kept += num_tokens

    async def acquire(self, journey: Journey, first_version: WeightVersion | None = None) -> Place:
        """A place on a worker for the journey's next attempt; release it after."""
        turn, deadline = self.trajectories.turn(journey, first_version), journey.route.deadline
        asked_at = time.monotonic()
        try:
            is_continuation = journey.num_attempts > 0
            place = await self.dispatcher.acquire(turn, deadline, is_continuation=is_continuation)
        finally:
            journey.queued_s += time.monotonic() - asked_at
        journey.num_attempts += 1
        place.worker.num_turns += 1
        return place

    async def _attempt(
        self, single: Single, place: Place, journey: Journey, sink: Sink | None
    ) -> tuple[Ending, str | None]:
        generation, epoch, model = single.generation, single.generation.epoch, None
        worker = place.worker

        async def take(chunk: Chunk, chunk_model: str | None) -> None:
            nonlocal model
            model = chunk_model
            if chunk.token_ids:
                journey.took(len(chunk.token_ids))
            if not generation.add(epoch, chunk, worker.id, worker.weight_version):
                self.counters.late_chunks += 1
            elif sink is not None and (chunk.token_ids or chunk.text):
                await sink.chunk(single, chunk, model)

        if generation.num_tokens:
            try:
                await self._end_on_character(generation, worker, is_streamed=sink is not None)
            except (aiohttp.ClientError, TimeoutError) as error:
                return Ending(kind=EndKind.LOST, detail=f"{worker.id}: {type(error).__name__}: {error}"), None
        span, before = journey.span, generation.num_tokens
        parent = span.begin_attempt(worker.id) if span is not None else None
        is_pinned = self.versions.mode is VersionMode.PINNED
        version = worker.weight_version if is_pinned else None
        attempt = Attempt(place, self.wire, self.config, version, parent)
        body = {**generation.next_body(), "request_id": f"{generation.request['request_id']}-{epoch}"}
        ending = await attempt.run(generation.path, body, take, journey.route.deadline)
        if span is not None:
            span.end_attempt(ending.kind.value, generation.num_tokens - before)
        if ending.kind is EndKind.FINISHED and attempt.prompt_tokens is not None:
            generation.num_prompt_tokens = attempt.prompt_tokens - before
        if attempt.cached_tokens is not None:
            worker.found_cached(place.turn.cached_tokens.get(worker.id, 0.0), attempt.cached_tokens)
            generation.cached_tokens = (generation.cached_tokens or 0) + attempt.cached_tokens
        return ending, model

    async def _end_on_character(self, generation: Accumulated, worker: Worker, is_streamed: bool) -> None:
        has_tokens = generation.logprobs is not None or bool(generation.request.get("return_token_ids"))
        decode = decoder(self.http, self.config, worker, generation.request.get("model"))
        await end_on_character(generation, decode, is_shown=is_streamed and has_tokens)

    def rerouted(self, ending: Ending, worker: Worker, journey: Journey) -> None:
        """Draw the consequences of an attempt that did not finish.

        Raises:
            Refused: the worker says the request itself is wrong.
            WorkerError: workers failed this request too often.
        """
        if ending.kind is EndKind.REFUSED:
            raise Refused(ending.status, ending.detail)
        now = time.monotonic()
        self.counters.reroutes[ending.kind.value] += 1
        logger.info("rerouting cause=%s worker=%s session=%s", ending.kind.value, worker.id, journey.session)
        journey.avoid_until[worker.id] = now + self.config.avoid_s
        if ending.kind in _WORKERS_FAULT:
            worker.suspect(now, self.config)
        if ending.kind in _YIELDS:
            worker.has_yielded = True
        if ending.kind is EndKind.DEACTIVATED:
            worker.is_active = False  # until a heartbeat says otherwise
        if ending.kind in _COUNTED_FAILURES:
            journey.num_failures += 1
            if journey.num_failures >= self.config.max_failures:
                raise WorkerError(f"{journey.num_failures} attempts failed, the last: {ending.detail}")

    def new_journey(self, route: Route) -> Journey:
        """For a request that goes to a worker whole: its session is the client's, or none."""
        session = route.explicit_session
        return Journey(
            session=session if session is not None else f"whole-{time.monotonic_ns()}", route=route
        )

    def job_status(self) -> dict[str, object]:
        queued = self.dispatcher.queued_by_job()
        return {job.name: job.as_json(queued.get(job.name, 0)) for job in self.jobs}

    def status(self) -> Mapping[str, object]:
        now = time.monotonic()
        return {
            "policy": self.config.policy,
            "version_mode": self.versions.mode.value,
            "max_lag": self.versions.max_lag,
            "paused": self.dispatcher.is_paused,
            "workers": [worker.as_json(now) for worker in self.registry.workers()],
            "queued": self.dispatcher.queued_by_job(),
            "jobs": self.job_status(),
            "sessions": len(self.trajectories.sessions),
            "counters": self.counters.as_json(),
        }
