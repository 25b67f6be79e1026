"""One attempt: a single request on one worker, watched for progress.

Owns: how an attempt ends.
Promises: an attempt ends with exactly one Ending, whatever the worker does.
Never does: choose workers, try again.
"""

from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from rose.scheduler.rollout.formats.bodies import encode
from rose.scheduler.rollout.formats.completions import Single
from rose.scheduler.rollout.formats.shape import Sink
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.attempt.boundary import decoder, end_on_character
from rose.scheduler.rollout.turn.attempt.endings import (
    Ending,
    EndKind,
    abort_ending,
    error_ending,
    lost_ending,
)
from rose.scheduler.rollout.turn.attempt.receive import Receiver
from rose.scheduler.rollout.turn.attempt.stream import request_body, stream
from rose.scheduler.rollout.turn.dispatch import DeadlineExceeded
from rose.scheduler.rollout.turn.journey import Journey
from rose.scheduler.rollout.turn.place import Place
from rose.scheduler.rollout.turn.records import TurnRecords
from rose.scheduler.rollout.turn.traces import PARENT_HEADER
from rose.scheduler.rollout.workers.watch import Watch
from rose.scheduler.rollout.workers.wire import Wire
from rose.types import WeightVersion

_MOST_DOUBLINGS = 4
"""A worker that has been silent for a turn gets at most 16 times the time for its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptParts:
    """The parts of the router that all attempts share."""

    config: RouterConfig
    http: aiohttp.ClientSession
    wire: Wire
    records: TurnRecords


class TurnAttempt:
    """Runs once. Lives on the router's event loop."""

    def __init__(
        self,
        parts: AttemptParts,
        single: Single,
        place: Place,
        journey: Journey,
        sink: Sink | None,
        version: WeightVersion | None,
    ) -> None:
        """`version`: the attempt keeps to this one, and ends when the worker receives other weights; None: it
        goes on with any."""
        self._parts = parts
        self._single = single
        self._generation = single.generation
        self._place = place
        self._worker = place.worker
        self._journey = journey
        self._sink = sink
        self._adapter = place.worker.adapters.get(journey.route.model or "")
        """The version of the LoRA adapter that makes all of the attempt's tokens, if its model is one, as far
        as the router knows. The worker may have a newer one already, and the stream then says so."""
        self._version = version
        self._receiver = Receiver(single, place, journey, sink, parts.records.counters, self._adapter)
        # The turn may be back at a worker that was silent: no other is left, and its prefill takes longer.
        num_doublings = min(journey.silences[place.worker.id], _MOST_DOUBLINGS)
        self._first_token_s = parts.config.first_token_s * 2**num_doublings

    async def run(self) -> Ending:
        """Streams the request into its generation and to the sink.

        Raises:
            DeadlineExceeded: the route's deadline passed first.
            WorkerError: tokens of an unfinished character were streamed and can't be taken back.
        """
        generation, span, before = self._generation, self._journey.span, len(self._generation.token_ids)
        if before and generation.needs_text:
            try:
                await self._end_on_character()
            except (aiohttp.ClientError, TimeoutError) as error:
                return self._lost(error)
            before = len(generation.token_ids)
        headers = self._place.headers
        if span is not None:
            headers += f"{PARENT_HEADER}: {span.begin_attempt(self._worker.id)}\r\n".encode()
        ending = await self._watched(headers)
        if self._receiver.finish_reason is not None and ending.kind is not EndKind.FINISHED:
            ending = self._ending()  # the answer was whole before its stream broke off
        if span is not None:
            span.end_attempt(ending.kind.value, generation.num_tokens - before)
        self._note_prompt(ending, before)
        if ending.kind is EndKind.FINISHED:
            reasons = (ending.finish_reason, ending.stop_reason)
            self._parts.records.finished(self._single, self._journey, self._worker, *reasons)
        return ending

    async def _end_on_character(self) -> None:
        request = self._generation.request
        has_tokens = self._generation.logprobs is not None or bool(request.get("return_token_ids"))
        decode = decoder(self._parts.http, self._parts.config, self._worker, request.get("model"))
        await end_on_character(self._generation, decode, are_shown=self._sink is not None and has_tokens)

    def _lost(self, error: Exception) -> Ending:
        return lost_ending(self._worker, f": {type(error).__name__}: {error}")

    async def _watched(self, headers: bytes) -> Ending:
        name = self._worker.id
        route = self._journey.route
        is_whole = self._adapter is None  # an adapter's version stays, whatever weights come
        watch = Watch(
            self._worker,
            route.deadline,
            self._version if is_whole else None,
            route.run_id if is_whole else None,
            self._first_token_s,
        )
        try:
            async with watch:
                return await self._stream(watch, headers)
        except TimeoutError:
            if watch.is_lost:
                return lost_ending(self._worker, " was lost")
            if watch.is_outdated:
                return Ending(kind=EndKind.OUTDATED, detail=f"{name} has other weights now")
            if watch.is_over:
                raise DeadlineExceeded(f"the turn's deadline passed while {name} was generating") from None
            if not self._place.num_tokens:
                self._journey.silences[name] += 1
            return Ending(kind=EndKind.STALLED, detail=f"{name} made no token in time")
        except OSError as error:
            return self._lost(error)
        except ValueError as error:
            return Ending(kind=EndKind.FAILED, detail=f"{name} sent no completion stream: {error}")

    async def _stream(self, watch: Watch, headers: bytes) -> Ending:
        worker, generation, config = self._worker, self._generation, self._parts.config
        watch.allow(self._first_token_s)
        status, text = await stream(
            self._parts.wire,
            worker.turn_urls[generation.path],
            headers,
            # An engine gives the run's name its newest version, of which it tells the router later.
            request_body(
                generation,
                worker.weight_version,
                worker.stream_interval(config),
                self._version if self._adapter is not None else None,
            ),
            self._receiver,
            watch,
            self._first_token_s,
            worker.stall_allowance_s(config),
        )
        if status == HTTPStatus.NOT_FOUND and self._adapter is not None:
            return Ending(kind=EndKind.UNLOADED, detail=f"{worker.id} does not hold {self._adapter}")
        return self._ending() if status == 200 else error_ending(worker.id, status, text)

    def _ending(self) -> Ending:
        seen, name = self._receiver, self._worker.id
        if seen.error is not None:
            # Once a token has come the client's request can't be at fault, whatever the code says.
            code = seen.error.get("code") if isinstance(seen.error, dict) else None
            status = code if isinstance(code, int) and self._place.num_tokens == 0 else 500
            return error_ending(name, status, encode({"error": seen.error}).decode())
        if seen.finish_reason is None:
            return Ending(kind=EndKind.ABORTED, detail=f"{name} ended the stream without a finish reason")
        aborted = abort_ending(name, seen.stop_reason) if seen.finish_reason == "abort" else None
        if aborted is not None:
            return aborted
        return Ending(kind=EndKind.FINISHED, finish_reason=seen.finish_reason, stop_reason=seen.stop_reason)

    def _note_prompt(self, ending: Ending, num_resumed: int) -> None:
        """Takes down what the worker said of the prompt; `num_resumed` of its tokens were generated
        before."""
        seen, generation, worker = self._receiver, self._generation, self._worker
        if ending.kind is EndKind.FINISHED and seen.prompt_tokens is not None:
            generation.num_prompt_tokens = seen.prompt_tokens - num_resumed
        if seen.cached_tokens is not None:
            expected_tokens = self._place.turn.cached_tokens.get(worker.id, 0.0)
            worker.found_cached(expected_tokens, seen.cached_tokens)
            generation.cached_tokens = (generation.cached_tokens or 0) + seen.cached_tokens
