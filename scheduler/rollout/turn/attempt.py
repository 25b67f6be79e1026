"""One attempt: a single request streamed from one worker, watched for progress.

Owns: the connection to the worker, the stall clock, how an attempt ends.
Promises: an attempt always ends with one Ending; a stream not read to its end is closed by then, so
vLLM drops the request.
Never does: choose workers, try again, merge.
"""

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from rose.http import NO_PROMPT_IDS_HEADER
from rose.scheduler.rollout.formats.bodies import Json, TokenIds, encode, encode_apart
from rose.scheduler.rollout.formats.events import CHAT_PATH, Event, read_events
from rose.scheduler.rollout.formats.resume import Chunk, known_prompt
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.dispatch import DeadlineExceeded
from rose.scheduler.rollout.turn.endings import Ending, EndKind, error_ending
from rose.scheduler.rollout.turn.placement import Place
from rose.scheduler.rollout.turn.traces import PARENT_HEADER
from rose.scheduler.rollout.turn.wire import Wire
from rose.scheduler.rollout.workers.watch import Watch
from rose.types import StopReason, WeightVersion

JSON_HEADERS = {"Content-Type": "application/json"}
_NO_PROMPT_IDS = f"{NO_PROMPT_IDS_HEADER}: 1\r\n".encode()
"""A worker without ROSE's endpoint sends them all the same."""
STREAM_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)

Events = AsyncIterator[tuple[Event, TokenIds | None]]
Take = Callable[[Chunk, str | None], Awaitable[None]]
"""Receives each chunk, with the model's name."""


@dataclass(slots=True)
class _Seen:
    """What the stream has told so far besides tokens."""

    model: str | None = None
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
        place: Place,
        wire: Wire,
        config: RouterConfig,
        version: WeightVersion | None = None,
        parent: str | None = None,
    ) -> None:
        """`version`: it ends when the worker gets other weights; None: any will do. `parent`: the
        `traceparent` of the worker's own spans, where turns are traced."""
        self._worker = place.worker
        self._headers = place.worker.openai_headers
        if parent is not None:
            self._headers += f"{PARENT_HEADER}: {parent}\r\n".encode()
        self._wire = wire
        self._config = config
        self._seen = _Seen()
        self._place = place
        self._version = version

    @property
    def cached_tokens(self) -> int | None:
        return self._seen.cached_tokens

    @property
    def prompt_tokens(self) -> int | None:
        """As the worker counted this attempt's prompt; None until it has ended well."""
        return self._seen.prompt_tokens

    async def run(self, path: str, body: Json, take: Take, deadline: float) -> Ending:
        """Stream the request at `path`; `take(chunk, model)` is awaited for every chunk, off the stall clock.

        Raises:
            DeadlineExceeded: `deadline` (monotonic time) passed first.
        """
        name = self._worker.id
        watch = Watch(self._worker, deadline, self._version)
        try:
            async with watch:
                return await self._run(watch, path, self._streaming(path, body), take)
        except TimeoutError:
            if watch.is_lost:
                return Ending(kind=EndKind.LOST, detail=f"{name} was lost")
            if watch.is_outdated:
                return Ending(kind=EndKind.OUTDATED, detail=f"{name} has other weights now")
            if watch.is_over:
                raise DeadlineExceeded(f"the turn's time is over while {name} was generating") from None
            return Ending(kind=EndKind.STALLED, detail=f"{name} made no token in time")
        except OSError as error:
            return Ending(kind=EndKind.LOST, detail=f"{name}: {type(error).__name__}: {error}")
        except ValueError as error:
            return Ending(kind=EndKind.FAILED, detail=f"{name} sent no completion stream: {error}")

    def _streaming(self, path: str, body: Json) -> Json:
        interval = self._worker.stream_interval(self._config)
        if (asked := body.get("stream_interval")) is not None:
            interval = min(interval, asked)
        return {
            **salted(body, self._worker.weight_version),
            "stream": True,
            # A chat's with each event: the first tells of the worker's parsers (see chunk_of).
            "stream_options": {"include_usage": True, "continuous_usage_stats": path == CHAT_PATH},
            "return_token_ids": True,
            "stream_interval": interval,
        }

    async def _run(self, watch: Watch, path: str, body: Json, take: Take) -> Ending:
        url = self._worker.turn_urls[path]
        watch.allow(self._config.first_token_s)
        knows_prompt = known_prompt(body) is not None
        headers = self._headers + _NO_PROMPT_IDS if knows_prompt else self._headers
        answer = await self._wire.post(url, headers, encode_apart(body))
        try:
            if answer.status != 200:
                return error_ending(answer.status, await answer.text())
            events = read_events(answer.pieces(), skips_prompt=knows_prompt)
            await self._read(watch, events, take)
        finally:
            self._wire.done(url, answer)
        return self._ending()

    async def _read(self, watch: Watch, events: Events, take: Take) -> None:
        allowance_s = self._config.first_token_s
        before: float | None = None
        began = time.monotonic()
        watch.allow(allowance_s)
        async for event, prompt_token_ids in events:
            chunk = self._note(event, prompt_token_ids)
            if chunk is None:
                continue
            if chunk.token_ids:
                now = time.monotonic()
                is_paced = before is not None and before > self._worker.updated_at
                took_s = now - before if before is not None and is_paced else None
                if before is None:
                    self._place.first_token(now - began)
                self._worker.made_tokens(len(chunk.token_ids), now, took_s)
                allowance_s, before = self._worker.stall_allowance_s(self._config), now
                self._seen.num_tokens += len(chunk.token_ids)
            watch.pause()
            await take(chunk, self._seen.model)
            watch.allow(allowance_s)

    def _note(self, event: Event, prompt_token_ids: TokenIds | None) -> Chunk | None:
        seen = self._seen
        if event.error is not None:
            seen.error = event.error
            return None
        if event.model is not None:
            seen.model = event.model
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

    def _ending(self) -> Ending:
        seen = self._seen
        if seen.error is not None:
            # After the first token it can't be the client's mistake, whatever the code says.
            code = seen.error.get("code") if isinstance(seen.error, dict) else None
            status = code if isinstance(code, int) and seen.num_tokens == 0 else 500
            return error_ending(status, encode({"error": seen.error}).decode())
        if seen.finish_reason is None:
            # vLLM swallows the finish of a request that was aborted before its first token.
            return Ending(kind=EndKind.RECLAIMED, detail=f"{self._worker.id} gave no finish")
        if seen.finish_reason == "abort" and seen.stop_reason == StopReason.RECLAIMED:
            return Ending(kind=EndKind.RECLAIMED, detail=f"{self._worker.id} reclaimed its memory")
        if seen.finish_reason == "abort" and seen.stop_reason == StopReason.STALLED:
            return Ending(kind=EndKind.ENGINE_STALL, detail=f"{self._worker.id} reported a stall")
        if seen.finish_reason == "abort" and seen.stop_reason == StopReason.DEACTIVATED:
            return Ending(kind=EndKind.DEACTIVATED, detail=f"{self._worker.id} was deactivated")
        return Ending(
            kind=EndKind.FINISHED,
            finish_reason=seen.finish_reason,
            stop_reason=seen.stop_reason,
            model=seen.model,
        )


def chunk_of(event: Event, prompt_token_ids: TokenIds | None) -> Chunk:
    """What an event with a choice adds; a chat's text is in its delta."""
    choice = event.choices[0]
    delta, token_ids = choice.delta, choice.token_ids or ()
    is_parsed = False
    if delta is not None:  # only parsers count reasoning, and only they keep text back
        counts_reasoning = event.usage is not None and event.usage.completion_tokens_details is not None
        is_parsed = counts_reasoning or (bool(token_ids) and delta.content is None)
    return Chunk(
        text=(choice.text if delta is None else delta.content) or "",
        token_ids=token_ids,
        logprobs=choice.logprobs,
        prompt_token_ids=prompt_token_ids,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        role=delta.role if delta is not None else None,
        is_parsed=is_parsed,
    )


MAX_SALT_CHARACTERS = 128


def salted(body: Json, version: WeightVersion | None) -> Json:
    """The body with the weight version in its cache salt, so that KV of other weights is never reused."""
    if version is None:
        return body
    own = body.get("cache_salt")
    # vLLM refuses '/' in a salt and more than 128 characters.
    salt = f"{version.run_id}:{version.number}" if not own else f"{own}|{version.run_id}:{version.number}"
    if len(salt) > MAX_SALT_CHARACTERS:
        salt = hashlib.sha256(salt.encode()).hexdigest()
    return {**body, "cache_salt": salt}
