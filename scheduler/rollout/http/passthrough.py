"""Requests that go to one worker whole: chats that can't be resumed, completions that can't be streamed.

Owns: forwarding a body and its answer unchanged, streamed or not; counting the tokens of such answers.
Promises: a request is tried again elsewhere while its client has received nothing. A worker that stops making
tokens is left, as for any turn. The tokens are charged to the request's job.
Never does: resume (formats/chat.py and formats/completions.py say what can't be), open further paths.
"""

import json
import re
import time
from http import HTTPStatus

import aiohttp
from aiohttp import web

from rose.errors import RoseError
from rose.scheduler.rollout.formats.bodies import Json, encode
from rose.scheduler.rollout.formats.salt import salted
from rose.scheduler.rollout.http.errors import error_event, http_status
from rose.scheduler.rollout.http.event_stream import hand_on
from rose.scheduler.rollout.turn.attempt.endings import (
    Ending,
    EndKind,
    abort_ending,
    error_ending,
    lost_ending,
)
from rose.scheduler.rollout.turn.attempt.progress import probed
from rose.scheduler.rollout.turn.attempt.receive import versioned_name
from rose.scheduler.rollout.turn.dataplane import DataPlane
from rose.scheduler.rollout.turn.dispatch import DeadlineExceeded
from rose.scheduler.rollout.turn.journey import Journey, Route
from rose.scheduler.rollout.turn.place import Place
from rose.scheduler.rollout.turn.records import CANCELLED, FINISHED
from rose.scheduler.rollout.turn.traces import PARENT_HEADER
from rose.scheduler.rollout.workers.registry import openai_headers
from rose.scheduler.rollout.workers.watch import Watch

JSON_HEADERS = {"Content-Type": "application/json"}
RENDER_PATH = "/v1/chat/completions/render"
"""The only path here that generates nothing."""
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_EVENT = b"data: {"
_TAIL_BYTES = 4096
"""The last event of a stream, which may hold its usage, fits into this."""


class Passthrough:
    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def forward(self, request: web.Request, body: Json, route: Route) -> web.StreamResponse:
        """Returns a worker's answer to `body` at the request's own path.

        Raises:
            RoseError: what Dispatcher.place and Rerouting.after raise.
        """
        async with self._plane.jobs.abortable(route.job, time.monotonic()):
            return await self._forward(request, body, route)

    async def _forward(self, request: web.Request, body: Json, route: Route) -> web.StreamResponse:
        records = self._plane.records
        journey = records.begin_whole(route, body)
        result = CANCELLED
        try:
            answer = await self._until_answered(request, body, journey)
            result = FINISHED
            return answer
        except RoseError as error:
            result = type(error).__name__
            raise
        finally:
            records.ended(journey, result)

    async def _until_answered(self, request: web.Request, body: Json, journey: Journey) -> web.StreamResponse:
        span = journey.span
        while True:
            place = await self._plane.dispatcher.place(journey)
            worker = place.worker
            parent = span.begin_attempt(worker.id) if span is not None else None
            attempt = _WholeAttempt(self._plane, place, journey, parent)
            try:
                outcome = await attempt.run(request, body)
            finally:
                self._plane.dispatcher.release(place, attempt.num_tokens)
            if isinstance(outcome, web.StreamResponse):
                if span is not None:
                    span.end_attempt(FINISHED)
                num_tokens = attempt.num_tokens if request.path != RENDER_PATH else None
                self._plane.records.finished_whole(journey, worker, num_tokens)
                return outcome
            if span is not None:
                span.end_attempt(outcome.kind.value)
            self._plane.rerouting.after(outcome, worker, journey)


class _WholeAttempt:
    """One worker's answer to a whole request. Runs once."""

    def __init__(self, plane: DataPlane, place: Place, journey: Journey, parent: str | None) -> None:
        self._plane = plane
        self._place = place
        self._worker = place.worker
        self._journey = journey
        self._adapter = place.worker.adapters.get(journey.route.model or "")
        self._parent = parent
        self._answer: web.StreamResponse | None = None
        """The answer, once a part of it has been sent to the client."""
        self._num_events = 0
        self._num_used: int | None = None
        self._line = b""
        """The beginning of a line of the stream, whose end has not come yet."""

    @property
    def num_tokens(self) -> int:
        """The tokens generated so far: the usage where the answer tells it, else one for each event."""
        return self._num_used if self._num_used is not None else self._num_events

    async def run(self, request: web.Request, body: Json) -> web.StreamResponse | Ending:
        """Forwards the request. Once the client has received something, a failure ends its stream."""
        try:
            ending = await self._watched(request, body)
        except DeadlineExceeded as error:
            if self._answer is None:
                raise
            return await self._break_off(request, self._answer, http_status(error), str(error))
        if isinstance(ending, Ending) and self._answer is not None:
            return await self._break_off(
                request, self._answer, 502, f"the worker's stream broke off: {ending.detail}"
            )
        return ending

    async def _watched(self, request: web.Request, body: Json) -> web.StreamResponse | Ending:
        plane, worker, route = self._plane, self._worker, self._journey.route
        run_id = route.run_id if self._adapter is None else None
        watch = Watch(worker, route.deadline, run_id=run_id, first_token_s=2 * plane.config.first_token_s)
        try:
            async with watch, probed(plane.wire, worker, watch, plane.config, route.model):
                return await self._exchange(request, body, watch)
        except TimeoutError as error:
            if watch.is_lost:
                return lost_ending(worker, " was lost")
            if watch.is_outdated:
                return Ending(kind=EndKind.OUTDATED, detail=f"{worker.id} has weights of another run now")
            if watch.is_over:
                raise DeadlineExceeded(f"{worker.id} did not answer before the deadline") from error
            return Ending(kind=EndKind.STALLED, detail=f"{worker.id} made no token in time")
        except (aiohttp.ClientError, ConnectionError) as error:
            return lost_ending(worker, f": {type(error).__name__}: {error}")

    async def _exchange(self, request: web.Request, body: Json, watch: Watch) -> web.StreamResponse | Ending:
        worker, plane = self._worker, self._plane
        if request.path != RENDER_PATH:
            body = salted(body, worker.weight_version)
            if self._adapter is not None:
                body = {**body, "model": versioned_name(self._adapter)}
        headers = {**openai_headers(plane.config), **JSON_HEADERS, **self._place.lease_headers}
        if self._parent is not None:
            headers[PARENT_HEADER] = self._parent
        url, data = f"{worker.spec.url}{request.path}", encode(body)
        async with plane.http.post(url, data=data, headers=headers, timeout=_TIMEOUT) as response:
            if response.content_type != "text/event-stream":
                return self._plain(response, await response.read())
            if first := await response.content.readany():
                return await self._relay(request, response, first, watch)
            return lost_ending(worker, " sent an empty stream")

    def _plain(self, response: aiohttp.ClientResponse, body: bytes) -> web.Response | Ending:
        if response.status == HTTPStatus.NOT_FOUND and self._adapter is not None:
            return Ending(kind=EndKind.UNLOADED, detail=f"{self._worker.id} does not hold {self._adapter}")
        if response.status != 200:
            return error_ending(self._worker.id, response.status, body.decode(errors="replace"))
        answer = json.loads(body)
        for choice in answer.get("choices", ()):
            if (ending := abort_ending(self._worker.id, choice.get("stop_reason"))) is not None:
                return ending
        self._num_used = (answer.get("usage") or {}).get("completion_tokens")
        if self._adapter is not None and "model" in answer:
            body = encode({**answer, "model": self._adapter.run_id})  # as the client named it
        return web.Response(body=body, content_type=response.content_type, headers=self._origin())

    async def _relay(
        self, request: web.Request, upstream: aiohttp.ClientResponse, first: bytes, watch: Watch
    ) -> web.StreamResponse:
        """Hands the stream on as it arrives. The client has received something from here on."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **self._origin()}
        self._answer = answer = web.StreamResponse(headers=headers)
        tail, data = b"", first
        while data:
            watch.allow(2 * self._plane.config.first_token_s)
            self._num_events += data.count(_EVENT)
            tail = (tail + data)[-_TAIL_BYTES:]
            await hand_on(request, answer, self._as_named(data) if self._adapter is not None else data)
            data = await upstream.content.readany()
        if used := _USAGE.findall(tail):
            self._num_used = int(used[-1])
        await hand_on(request, answer, self._line)
        return answer

    def _as_named(self, data: bytes) -> bytes:
        """Returns the whole lines of a stream that have come, with the model as the client named it."""
        assert self._adapter is not None
        ended, newline, self._line = (self._line + data).rpartition(b"\n")
        asked = b'"model":' + json.dumps(self._adapter.run_id).encode()
        served = json.dumps(versioned_name(self._adapter)).encode()
        # Quotes within a JSON string are escaped, so this finds nothing in a text.
        return re.sub(rb'"model": ?' + re.escape(served), lambda _: asked, ended + newline)

    def _origin(self) -> dict[str, str]:
        """Returns the headers that say where an answer comes from, as its body can't."""
        version = self._adapter if self._adapter is not None else self._worker.weight_version
        shown = {"X-Rose-Weight-Version": str(version)} if version else {}
        return {"X-Rose-Worker": self._worker.id, **shown}

    @staticmethod
    async def _break_off(
        request: web.Request, answer: web.StreamResponse, status: int, message: str
    ) -> web.StreamResponse:
        await hand_on(request, answer, error_event(status, message))
        return answer
