"""Requests that a client sends twice: the second one waits for the first one's answer, or takes the place of
the first one's stream.

Owns: the table of Idempotency-Keys in flight.
Promises: while a request with a key runs, another with the same key and body gets the same answer and costs
no worker anything. A stream can't be shared, so a retry ends it, and runs when it has ended. The key is free
again once the request is answered, because equal GRPO prompts are legitimate.
Never does: remember answers.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import xxhash
from aiohttp import web

from rose.http import SO_FAR
from rose.scheduler.rollout.formats.bodies import Json
from rose.scheduler.rollout.http.errors import Conflict

IDEMPOTENCY_HEADER = "Idempotency-Key"


@dataclass(frozen=True, slots=True)
class SharedAnswer:
    """A whole answer, which is sent to every client that waits for it."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})

    @classmethod
    def of(cls, response: web.StreamResponse) -> Self:
        """Takes an answer that is no stream, and has not been sent."""
        assert isinstance(response, web.Response) and isinstance(response.body, bytes)
        return cls(response.body, response.status, dict(response.headers))

    def response(self) -> web.Response:
        return web.Response(body=self.body, status=self.status, headers=self.headers)


@dataclass(slots=True)
class _Running:
    digest: int
    task: asyncio.Task[SharedAnswer]
    num_waiting: int = 0


class _Stream(NamedTuple):
    body: Json
    clock: asyncio.Timeout
    """It runs out when a retry takes the stream's place."""
    lock: asyncio.Lock
    """Whichever of the key's streams runs holds it."""


class InFlight:
    """Lives on the router's event loop."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self._streams: dict[str, _Stream] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._running or key in self._streams

    @asynccontextmanager
    async def stream(self, key: str, body: Json) -> AsyncIterator[None]:
        """Lets a stream run inside until a retry takes its place, once an earlier one with the same key has
        ended. The retry may say which tokens have come.

        Raises:
            Conflict: the key is in flight with another body, or a retry has taken this stream's place.
        """
        earlier = self._streams.get(key)
        if key in self._running or (earlier is not None and _asked(earlier.body) != _asked(body)):
            raise _other_body(key)
        lock = earlier.lock if earlier is not None else asyncio.Lock()
        mine = self._streams[key] = _Stream(body, asyncio.timeout(None), lock)
        if earlier is not None:
            earlier.clock.reschedule(asyncio.get_running_loop().time())
        try:
            async with mine.clock, lock:  # the earlier one has a place, or room in a queue, until its end
                yield
        except TimeoutError:
            if not mine.clock.expired():
                raise
            raise Conflict(
                f"{IDEMPOTENCY_HEADER}: a retry with this key has taken the stream's place"
            ) from None
        finally:
            if self._streams.get(key) is mine:
                del self._streams[key]

    async def run(
        self, key: str | None, body: bytes, work: Callable[[], Coroutine[Any, Any, SharedAnswer]]
    ) -> SharedAnswer:
        """Returns the answer of `work()`, or of the same request that is already running.

        A request with a key goes on while any client waits for it, and is cancelled when the last one leaves.

        Raises:
            Conflict: a request with the same key and another body is in flight.
            Exception: whatever `work` raises.
        """
        if key is None:
            return await work()
        if key in self._streams:
            raise _other_body(key)
        digest = xxhash.xxh3_64_intdigest(body)
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = _Running(digest, asyncio.create_task(work()))
            running.task.add_done_callback(lambda _: self._forget(key, running))
        elif running.digest != digest:
            raise _other_body(key)
        running.num_waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.num_waiting -= 1
            if not running.num_waiting:
                self._forget(key, running)  # a retry that comes before the task has ended starts again
                running.task.cancel()

    def _forget(self, key: str, running: _Running) -> None:
        if self._running.get(key) is running:
            del self._running[key]


def _other_body(key: str) -> Conflict:
    return Conflict(f"{IDEMPOTENCY_HEADER}: {key} is in flight with another body; use another key")


def _asked(body: Json) -> Json:
    """Returns a body without what tells a retry from the first request."""
    return {name: value for name, value in body.items() if name != SO_FAR}
