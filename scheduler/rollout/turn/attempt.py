"""One attempt: a single request streamed from one worker and watched for progress.

Owns: what is sent to the worker, the stall clock, and how an attempt ends.
Promises: an attempt ends with exactly one Ending. A stream that was not read to its end is closed by then, so
vLLM drops the request.
Never does: choose workers, try again.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from rose.http import NO_PROMPT_IDS_HEADER
from rose.scheduler.rollout.formats.bodies import Json, TokenIds, encode, encode_apart
from rose.scheduler.rollout.formats.chunks import Chunk, chunk_of
from rose.scheduler.rollout.formats.completions import Single
from rose.scheduler.rollout.formats.events import CHAT_PATH, Event, read_events
from rose.scheduler.rollout.formats.resume import known_prompt
from rose.scheduler.rollout.formats.salt import salted
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.boundary import decoder, end_on_character
from rose.scheduler.rollout.turn.dispatch import DeadlineExceeded
from rose.scheduler.rollout.turn.endings import Ending, EndKind, abort_ending, error_ending
from rose.scheduler.rollout.turn.journey import Journey
from rose.scheduler.rollout.turn.places import Place
from rose.scheduler.rollout.turn.records import TurnRecords
from rose.scheduler.rollout.turn.traces import PARENT_HEADER
from rose.scheduler.rollout.turn.wire import Wire
from rose.scheduler.rollout.workers.watch import Watch
from rose.types import WeightVersion

_NO_PROMPT_IDS = f"{NO_PROMPT_IDS_HEADER}: 1\r\n".encode()
"""A worker without ROSE's endpoint ignores this and sends the ids."""


class Sink(Protocol):
    """Receives a streamed answer while it is generated."""

    async def chunk(self, single: Single, chunk: Chunk, model: str | None) -> None: ...

    async def end(self, single: Single, model: str | None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptParts:
    """The parts of the router that all attempts share."""

    config: RouterConfig
    http: aiohttp.ClientSession
    wire: Wire
    records: TurnRecords


@dataclass(slots=True)
class _Seen:
    """What the stream has said so far besides its tokens."""

    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: object = None
    num_tokens: int = 0


class Attempt:
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
        """`version`: the attempt ends when the worker receives other weights; None: it goes on with any."""
        self._parts = parts
        self._single = single
        self._generation = single.generation
        self._epoch = single.generation.epoch
        self._place = place
        self._worker = place.worker
        self._journey = journey
        self._sink = sink
        self._version = version
        self._seen = _Seen()

    async def run(self) -> Ending:
        """Streams the request into its generation and to the sink.

        Raises:
            DeadlineExceeded: the route's deadline passed first.
            WorkerError: tokens of an unfinished character were streamed and can't be taken back.
        """
        generation, span, before = self._generation, self._journey.span, self._generation.num_tokens
        if before:
            try:
                await self._end_on_character()
            except (aiohttp.ClientError, TimeoutError) as error:
                return self._lost(error)
            before = generation.num_tokens
        headers = self._worker.openai_headers
        if span is not None:
            headers += f"{PARENT_HEADER}: {span.begin_attempt(self._worker.id)}\r\n".encode()
        ending = await self._watched(headers)
        if span is not None:
            span.end_attempt(ending.kind.value, generation.num_tokens - before)
        self._note_prompt(ending, before)
        if ending.kind is EndKind.FINISHED:
            generation.finish(ending.finish_reason, ending.stop_reason)
            self._parts.records.finished(self._single, self._journey, self._worker)
        return ending

    async def _end_on_character(self) -> None:
        request = self._generation.request
        has_tokens = self._generation.logprobs is not None or bool(request.get("return_token_ids"))
        decode = decoder(self._parts.http, self._parts.config, self._worker, request.get("model"))
        await end_on_character(self._generation, decode, are_shown=self._sink is not None and has_tokens)

    def _lost(self, error: Exception) -> Ending:
        detail = f"{self._worker.id}: {type(error).__name__}: {error}"
        return Ending(kind=EndKind.LOST, detail=detail)

    async def _watched(self, headers: bytes) -> Ending:
        name = self._worker.id
        watch = Watch(self._worker, self._journey.route.deadline, self._version)
        try:
            async with watch:
                return await self._stream(watch, headers)
        except TimeoutError:
            if watch.is_lost:
                return Ending(kind=EndKind.LOST, detail=f"{name} was lost")
            if watch.is_outdated:
                return Ending(kind=EndKind.OUTDATED, detail=f"{name} has other weights now")
            if watch.is_over:
                raise DeadlineExceeded(f"the turn's deadline passed while {name} was generating") from None
            return Ending(kind=EndKind.STALLED, detail=f"{name} made no token in time")
        except OSError as error:
            return self._lost(error)
        except ValueError as error:
            return Ending(kind=EndKind.FAILED, detail=f"{name} sent no completion stream: {error}")

    def _body(self) -> Json:
        generation, config = self._generation, self._parts.config
        interval = self._worker.stream_interval(config)
        if (asked := generation.request.get("stream_interval")) is not None:
            interval = min(interval, asked)
        return {
            **salted(generation.next_body(), self._worker.weight_version),
            "request_id": f"{generation.request['request_id']}-{self._epoch}",
            "stream": True,
            # A chat's first usage shows whether the worker parses the text (see chunk_of).
            "stream_options": {
                "include_usage": True,
                "continuous_usage_stats": generation.path == CHAT_PATH,
            },
            "return_token_ids": True,
            "stream_interval": interval,
        }

    async def _stream(self, watch: Watch, headers: bytes) -> Ending:
        body, url = self._body(), self._worker.turn_urls[self._generation.path]
        watch.allow(self._parts.config.first_token_s)
        knows_prompt = known_prompt(body) is not None
        if knows_prompt:
            headers += _NO_PROMPT_IDS
        wire = self._parts.wire
        answer = await wire.post(url, headers, encode_apart(body))
        try:
            if answer.status != 200:
                return error_ending(answer.status, await answer.text())
            await self._read(watch, read_events(answer.pieces(), skips_prompt=knows_prompt))
        finally:
            wire.done(url, answer)
        return self._ending()

    async def _read(self, watch: Watch, events: AsyncIterator[tuple[Event, TokenIds | None]]) -> None:
        worker, config = self._worker, self._parts.config
        allowance_s = config.first_token_s
        before: float | None = None
        began = time.monotonic()
        watch.allow(allowance_s)
        async for event, prompt_token_ids in events:
            chunk = self._note(event, prompt_token_ids)
            if chunk is None:
                continue
            if chunk.token_ids:
                now = time.monotonic()
                is_paced = before is not None and before > worker.updated_at
                took_s = now - before if before is not None and is_paced else None
                if before is None:
                    self._place.first_token(now - began)
                worker.made_tokens(len(chunk.token_ids), now, took_s)
                allowance_s, before = worker.stall_allowance_s(config), now
                self._seen.num_tokens += len(chunk.token_ids)
                self._journey.received(len(chunk.token_ids))
            watch.pause()  # a slow client is no stall
            await self._add(chunk)
            watch.allow(allowance_s)

    def _note(self, event: Event, prompt_token_ids: TokenIds | None) -> Chunk | None:
        seen = self._seen
        if event.error is not None:
            seen.error = event.error
            return None
        if event.model is not None:
            self._journey.served_model = event.model
        if event.usage is not None:
            seen.prompt_tokens = event.usage.prompt_tokens
            if event.usage.prompt_tokens_details is not None:
                seen.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        if not event.choices:
            return None
        choice = event.choices[0]
        if choice.finish_reason is not None:
            seen.finish_reason, seen.stop_reason = choice.finish_reason, choice.stop_reason
        return chunk_of(event, prompt_token_ids)

    async def _add(self, chunk: Chunk) -> None:
        worker = self._worker
        if not self._generation.add(self._epoch, chunk, worker.id, worker.weight_version):
            self._parts.records.counters.late_chunks += 1
        elif self._sink is not None and (chunk.token_ids or chunk.text):
            await self._sink.chunk(self._single, chunk, self._journey.served_model)

    def _ending(self) -> Ending:
        seen, name = self._seen, self._worker.id
        if seen.error is not None:
            # Once a token has come the client's request can't be at fault, whatever the code says.
            code = seen.error.get("code") if isinstance(seen.error, dict) else None
            status = code if isinstance(code, int) and seen.num_tokens == 0 else 500
            return error_ending(status, encode({"error": seen.error}).decode())
        if seen.finish_reason is None:
            return Ending(kind=EndKind.ABORTED, detail=f"{name} ended the stream without a finish reason")
        aborted = abort_ending(name, seen.stop_reason) if seen.finish_reason == "abort" else None
        if aborted is not None:
            return aborted
        return Ending(kind=EndKind.FINISHED, finish_reason=seen.finish_reason, stop_reason=seen.stop_reason)

    def _note_prompt(self, ending: Ending, num_resumed: int) -> None:
        """Takes down what the worker said of the prompt; `num_resumed` of its tokens were generated
        before."""
        seen, generation, worker = self._seen, self._generation, self._worker
        if ending.kind is EndKind.FINISHED and seen.prompt_tokens is not None:
            generation.num_prompt_tokens = seen.prompt_tokens - num_resumed
        if seen.cached_tokens is not None:
            expected_tokens = self._place.turn.cached_tokens.get(worker.id, 0.0)
            worker.found_cached(expected_tokens, seen.cached_tokens)
            generation.cached_tokens = (generation.cached_tokens or 0) + seen.cached_tokens
