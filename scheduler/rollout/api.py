"""HTTP in front of the data plane.

Owns: the client's routes, keys, error answers, drain.
Promises: only the routes listed here and in admin.py exist, so a worker's /rose/v1 and RL routes can't be
reached through the router.
Never does: routing decisions.
"""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from rose.errors import NoWorkerError, RoseError, WorkerError
from rose.scheduler.rollout import completions
from rose.scheduler.rollout.admin import Admin
from rose.scheduler.rollout.completions import BadRequest, Call, Single
from rose.scheduler.rollout.config import RouterConfig
from rose.scheduler.rollout.dataplane import DataPlane, Refused, Route
from rose.scheduler.rollout.dispatch import DeadlineExceeded, QueueFull
from rose.scheduler.rollout.passthrough import Passthrough, error_body, error_event
from rose.scheduler.rollout.registry import openai_headers
from rose.scheduler.rollout.resume import Chunk, Json
from rose.scheduler.rollout.sessions import explicit_key
from rose.scheduler.rollout.versions import VersionGone

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_BODY_BYTES = 256 * 2**20
_RETRY_AFTER_S = 1
_WHOLE_PATHS = ("/v1/chat/completions", "/v1/chat/completions/render", "/inference/v1/generate")
_QUESTION_PATHS = ("/tokenize", "/detokenize")
_JOB_HEADER = "X-Rose-Job"
_RUN_HEADER = "X-Rose-Run"
_TIMEOUT_HEADER = "X-Rose-Timeout-S"


def http_status(error: RoseError | BadRequest) -> int:
    """The status a client gets for an error of ours."""
    statuses: tuple[tuple[type[Exception], int], ...] = (
        (BadRequest, 400),
        (VersionGone, 409),
        (QueueFull, 429),
        (WorkerError, 502),
        (NoWorkerError, 503),
        (DeadlineExceeded, 504),
    )
    return next((status for kind, status in statuses if isinstance(error, kind)), 500)


class Service:
    def __init__(self, config: RouterConfig, plane: DataPlane) -> None:
        self._config = config
        self._plane = plane
        self._passthrough = Passthrough(plane)
        self._is_draining = False
        self._num_active = 0

    def build_app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        for path in _WHOLE_PATHS:
            app.router.add_post(path, self.forward)
        for path in _QUESTION_PATHS:
            app.router.add_post(path, self.ask)
        Admin(self._plane).add_routes(app)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keys, drain, and our errors as HTTP answers."""
        if not self._is_allowed(request):
            return web.json_response(error_body(401, "wrong or missing key in Authorization"), status=401)
        if self._is_draining and request.method == "POST":
            return _error_response(503, "the router is shutting down")
        self._num_active += 1
        try:
            return await handler(request)
        except Refused as refused:
            return web.Response(text=refused.body, status=refused.status, content_type="application/json")
        except (RoseError, BadRequest) as error:
            return _error_response(http_status(error), str(error))
        finally:
            self._num_active -= 1

    def _is_allowed(self, request: web.Request) -> bool:
        if request.path in ("/health", "/metrics"):
            return True
        is_admin = request.path.startswith(("/admin", "/workers"))
        key = self._config.admin_key if is_admin else self._config.api_key
        if key is None:
            return True
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), key.encode())

    async def health(self, _request: web.Request) -> web.Response:
        workers = self._plane.registry.workers()
        num_alive = sum(worker.is_alive for worker in workers)
        is_up = num_alive > 0 and not self._is_draining
        return web.json_response({"workers": len(workers), "alive": num_alive}, status=200 if is_up else 503)

    async def models(self, request: web.Request) -> web.Response:
        return await self._ask_any(request, "GET", None)

    async def ask(self, request: web.Request) -> web.Response:
        return await self._ask_any(request, "POST", await request.read())

    async def _ask_any(self, request: web.Request, method: str, body: bytes | None) -> web.Response:
        """A question that any worker can answer without generating."""
        alive = sorted((w for w in self._plane.registry.workers() if w.is_alive), key=lambda w: w.in_flight)
        for worker in alive:
            url = f"{worker.spec.url}{request.path}"
            headers = {**openai_headers(self._config), "Content-Type": "application/json"}
            timeout = aiohttp.ClientTimeout(total=self._config.first_token_s)
            try:
                async with self._plane.http.request(
                    method, url, data=body, headers=headers, timeout=timeout
                ) as response:
                    data = await response.read()
                    return web.Response(body=data, status=response.status, content_type=response.content_type)
            except (aiohttp.ClientError, TimeoutError) as error:
                logger.warning(
                    "no answer worker=%s path=%s error=%s", worker.id, request.path, type(error).__name__
                )
        raise NoWorkerError(f"none of {len(self._plane.registry.workers())} workers answers")

    def _route(self, request: web.Request, body: Json) -> Route:
        given = request.headers.get(_TIMEOUT_HEADER)
        try:
            seconds = (
                min(float(given), self._config.deadline_s) if given is not None else self._config.deadline_s
            )
        except ValueError as error:
            raise BadRequest(f"{_TIMEOUT_HEADER}: want seconds, got {given!r}") from error
        return Route(
            job=request.headers.get(_JOB_HEADER, "default"),
            explicit_session=explicit_key(request.headers, body),
            run_id=request.headers.get(_RUN_HEADER),
            deadline=time.monotonic() + seconds,
        )

    async def forward(self, request: web.Request) -> web.StreamResponse:
        body = await _json_body(request)
        return await self._passthrough.forward(request, body, self._route(request, body))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await _json_body(request)
        route = self._route(request, body)
        if not completions.can_stream(body):
            return await self._passthrough.forward(request, body, route)
        call = completions.fan_out(body)
        if call.wants_stream:
            return await self._complete_streaming(request, call, route)
        model = await self._plane.complete(call, route, None)
        return web.json_response(completions.answer(call, model))

    async def _complete_streaming(self, request: web.Request, call: Call, route: Route) -> web.StreamResponse:
        sink = _EventStream(request, call)
        try:
            model = await self._plane.complete(call, route, sink)
        except RoseError as error:
            if not sink.answer.prepared:
                raise
            await sink.answer.write(error_event(http_status(error), str(error)))
            return sink.answer
        if (usage := completions.stream_usage(call, model)) is not None:
            await sink.send(usage)
        await sink.answer.write(b"data: [DONE]\n\n")
        return sink.answer

    async def drain(self) -> None:
        """Refuse new work and wait for what is in flight, at most `drain_s`."""
        self._is_draining = True
        until = time.monotonic() + self._config.drain_s
        while self._num_active and time.monotonic() < until:
            await asyncio.sleep(0.05)
        logger.info("drained left=%d", self._num_active)


class _EventStream:
    """A client's event stream; begins with the first event, so that an error before it has its own status."""

    def __init__(self, request: web.Request, call: Call) -> None:
        self._request = request
        self._call = call
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self.answer = web.StreamResponse(headers=headers)

    async def send(self, event: Json) -> None:
        if not self.answer.prepared:
            await self.answer.prepare(self._request)
        await self.answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    async def chunk(self, single: Single, chunk: Chunk, model: str | None) -> None:
        await self.send(completions.stream_chunk(self._call, single, chunk, model))

    async def end(self, single: Single, model: str | None) -> None:
        await self.send(completions.stream_end(self._call, single, model))


async def _json_body(request: web.Request) -> Json:
    try:
        body = await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def _error_response(status: int, message: str) -> web.Response:
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status in (429, 503) else None
    return web.json_response(error_body(status, message), status=status, headers=headers)
