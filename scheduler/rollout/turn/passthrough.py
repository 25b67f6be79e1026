"""Requests that go to one worker whole: chats that can't be resumed, completions that can't be streamed.

Owns: forwarding a body and its answer as they are, streamed or not.
Promises: tried again elsewhere as long as the client has received nothing.
Never does: resume (chat.py and completions.py say why these can't be), expose any path it isn't given.
"""

import json
import time

import aiohttp
from aiohttp import web

from rose.errors import RoseError
from rose.scheduler.rollout.formats.bodies import Json, encode
from rose.scheduler.rollout.turn.aborts import abortable
from rose.scheduler.rollout.turn.attempt import JSON_HEADERS, STREAM_TIMEOUT, salted
from rose.scheduler.rollout.turn.dataplane import DataPlane
from rose.scheduler.rollout.turn.dispatch import DeadlineExceeded
from rose.scheduler.rollout.turn.endings import Ending, EndKind, error_ending
from rose.scheduler.rollout.turn.errors import error_event
from rose.scheduler.rollout.turn.journey import Journey, Route
from rose.scheduler.rollout.turn.traces import PARENT_HEADER
from rose.scheduler.rollout.workers.registry import openai_headers
from rose.scheduler.rollout.workers.watch import Watch
from rose.scheduler.rollout.workers.worker import Worker
from rose.types import StopReason

_ROSE_STOPS = tuple(reason.value for reason in StopReason)
_UNSALTED = ("/v1/chat/completions/render",)


class Passthrough:
    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def forward(self, request: web.Request, body: Json, route: Route) -> web.StreamResponse:
        """The picked worker's answer to `body` at the request's own path.

        Raises:
            what Dispatcher.acquire and DataPlane.rerouted raise.
        """
        async with abortable(self._plane.jobs.get(route.job, time.monotonic())):
            return await self._forward(request, body, route)

    async def _forward(self, request: web.Request, body: Json, route: Route) -> web.StreamResponse:
        journey = self._plane.traced(self._plane.new_journey(route))
        result = "cancelled"
        try:
            answer = await self._until_answered(request, body, journey)
            result = "finished"
            return answer
        except RoseError as error:
            result = type(error).__name__
            raise
        finally:
            self._plane.ended(journey, result)

    async def _until_answered(self, request: web.Request, body: Json, journey: Journey) -> web.StreamResponse:
        span = journey.span
        while True:
            place = await self._plane.acquire(journey)
            worker = place.worker
            parent = span.begin_attempt(worker.id) if span is not None else None
            try:
                outcome = await self._try(request, body, worker, journey, parent)
            finally:
                self._plane.dispatcher.release(place)
            if isinstance(outcome, web.StreamResponse):
                if span is not None:
                    span.end_attempt("finished")
                self._plane.trajectories.answered_whole(journey, worker)
                return outcome
            if span is not None:
                span.end_attempt(outcome.kind.value)
            self._plane.rerouted(outcome, worker, journey)

    async def _try(
        self, request: web.Request, body: Json, worker: Worker, journey: Journey, parent: str | None
    ) -> web.StreamResponse | Ending:
        if request.path not in _UNSALTED:
            body = salted(body, worker.weight_version)
        url = f"{worker.spec.url}{request.path}"
        headers = {**openai_headers(self._plane.config), **JSON_HEADERS}
        if parent is not None:
            headers[PARENT_HEADER] = parent
        watch = Watch(worker, journey.route.deadline)
        try:
            async with watch:
                watch.pause()  # an answer that comes whole shows no progress
                post = self._plane.http.post
                async with post(url, data=encode(body), headers=headers, timeout=STREAM_TIMEOUT) as response:
                    if response.content_type != "text/event-stream":
                        return _plain(response, await response.read(), worker)
                    if first := await response.content.readany():
                        return await _relay(request, response, first, worker)
                    return Ending(kind=EndKind.LOST, detail=f"{worker.id} sent an empty stream")
        except TimeoutError as error:
            if watch.is_lost:
                return Ending(kind=EndKind.LOST, detail=f"{worker.id} was lost")
            raise DeadlineExceeded(f"{worker.id} did not answer in time") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            return Ending(kind=EndKind.LOST, detail=f"{worker.id}: {type(error).__name__}: {error}")


def _plain(response: aiohttp.ClientResponse, body: bytes, worker: Worker) -> web.Response | Ending:
    if response.status != 200:
        return error_ending(response.status, body.decode(errors="replace"))
    if any(choice.get("stop_reason") in _ROSE_STOPS for choice in json.loads(body).get("choices", ())):
        return Ending(kind=EndKind.RECLAIMED, detail=f"{worker.id} aborted the request")
    return web.Response(body=body, content_type=response.content_type, headers=_origin(worker))


def _origin(worker: Worker) -> dict[str, str]:
    """Where an answer comes from, for answers whose inside isn't ours."""
    version = {"X-Rose-Weight-Version": str(worker.weight_version)} if worker.weight_version else {}
    return {"X-Rose-Worker": worker.id, **version}


async def _relay(
    request: web.Request, upstream: aiohttp.ClientResponse, first: bytes, worker: Worker
) -> web.StreamResponse:
    """Hand the stream on as it comes. From here on the client has received something: no second try."""
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **_origin(worker)}
    answer = web.StreamResponse(headers=headers)
    await answer.prepare(request)
    await answer.write(first)
    try:
        async for data in upstream.content.iter_any():
            await answer.write(data)
    except (aiohttp.ClientError, TimeoutError) as error:
        await answer.write(error_event(502, f"the worker's stream broke off: {type(error).__name__}"))
    await answer.write_eof()
    return answer
