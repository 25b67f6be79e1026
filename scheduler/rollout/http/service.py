"""The clients' routes.

Owns: reading requests, and answering them whole or as event streams.
Promises: only the routes listed here and in admin.py exist, so a worker's /rose/v1 and RL routes can't be
reached through the router.
Never does: place turns (turn/), check keys, turn errors into answers (guard.py).
"""

import asyncio
import logging
import math
import time

import aiohttp
from aiohttp import web

from rose.errors import NoWorkerError, RoseError
from rose.scheduler.rollout.formats import chat, completions
from rose.scheduler.rollout.formats.bodies import BadRequest, Json, encode, parse
from rose.scheduler.rollout.formats.chat import Chat, ChatParsed
from rose.scheduler.rollout.formats.completions import Call, Completions, Single
from rose.scheduler.rollout.formats.events import Chunk
from rose.scheduler.rollout.formats.generate import TokenGenerate
from rose.scheduler.rollout.formats.sglang import SglangGenerate
from rose.scheduler.rollout.formats.shape import Format
from rose.scheduler.rollout.http.admin import Admin
from rose.scheduler.rollout.http.callers import Callers
from rose.scheduler.rollout.http.checks import Checks
from rose.scheduler.rollout.http.errors import SERVER_NAME, BodyTooSlow, Conflict, error_event, http_status
from rose.scheduler.rollout.http.guard import Guard, Handler
from rose.scheduler.rollout.http.inflight import IDEMPOTENCY_HEADER, InFlight, SharedAnswer
from rose.scheduler.rollout.http.passthrough import RENDER_PATH, Passthrough
from rose.scheduler.rollout.placing.sessions import explicit_key
from rose.scheduler.rollout.placing.views import of_model
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.dataplane import DataPlane
from rose.scheduler.rollout.turn.journey import Route
from rose.scheduler.rollout.turn.traces import PARENT_HEADER
from rose.scheduler.rollout.workers.registry import openai_headers

logger = logging.getLogger(__name__)

_FORMATS: dict[str, Format] = {
    "/v1/completions": Completions(),
    "/v1/chat/completions": Chat(),
    "/inference/v1/generate": TokenGenerate(),
    "/generate": SglangGenerate(),
}
_QUESTION_PATHS = {"/tokenize": "prompt", "/detokenize": "tokens"}
"""The paths, each with the field that may hold a long list."""
_FINISH_PATH = "/finish_session"
_TIMEOUT_HEADER = "X-Rose-Timeout-S"


class Service:
    def __init__(self, config: RouterConfig, plane: DataPlane) -> None:
        self._config = config
        self._plane = plane
        self._passthrough = Passthrough(plane)
        self._checks = Checks(plane.registry)
        self._callers = Callers(plane.registry, plane.jobs, config.api_key, config.run_id)
        self._guard = Guard(config, self._callers)
        self._in_flight = InFlight()
        self._parsed_models: set[str | None] = set()
        """The models whose chats a parser in the workers splits into reasoning and tool calls."""

    def build_app(self) -> web.Application:
        app = web.Application(
            client_max_size=self._config.max_body_bytes, middlewares=[self._guard.middleware]
        )
        app.on_response_prepare.append(_name_server)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        for path, shape in _FORMATS.items():
            app.router.add_post(path, self._generating(shape))
        app.router.add_post(RENDER_PATH, self.forward)
        for path in _QUESTION_PATHS:
            app.router.add_post(path, self.ask)
        app.router.add_post(_FINISH_PATH, self.finish_session)
        Admin(self._plane, self._guard).add_routes(app)
        return app

    async def drain(self) -> None:
        """Refuses new work and waits for the requests in flight, at most `drain_s`."""
        await self._guard.drain()

    async def health(self, _request: web.Request) -> web.Response:
        """Answers 200 while some worker is alive and the router takes requests, else 503."""
        workers = self._plane.registry.workers()
        num_alive = sum(worker.is_alive for worker in workers)
        is_up = num_alive > 0 and not self._guard.is_draining
        return web.json_response({"workers": len(workers), "alive": num_alive}, status=200 if is_up else 503)

    # Questions that any worker answers without generating ------------------------------------------------

    async def models(self, _request: web.Request) -> web.Response:
        """Lists every model that some worker serves."""
        registry = self._plane.registry
        if not any(worker.is_alive for worker in registry.workers()):
            raise NoWorkerError(f"no worker answers; {len(registry.workers())} are registered")
        await registry.refresh_models()
        body = encode({"object": "list", "data": registry.model_cards()})
        return web.Response(body=body, content_type="application/json")

    async def ask(self, request: web.Request) -> web.Response:
        """Hands on the answer of a worker that serves the model."""
        body = await self._read(request)
        model = await self._checks.model(parse(body, _QUESTION_PATHS[request.path]).get("model"))
        able = of_model(model, self._plane.registry.workers())
        for worker in sorted((w for w in able if w.is_alive), key=lambda w: w.in_flight):
            url = f"{worker.spec.url}{request.path}"
            headers = {**openai_headers(self._config), "Content-Type": "application/json"}
            timeout = aiohttp.ClientTimeout(total=self._config.first_token_s)
            try:
                async with self._plane.http.post(
                    url, data=body, headers=headers, timeout=timeout
                ) as response:
                    data = await response.read()
                    return web.Response(body=data, status=response.status, content_type=response.content_type)
            except (aiohttp.ClientError, TimeoutError) as error:
                logger.warning(
                    "no answer worker=%s path=%s error=%s", worker.id, request.path, type(error).__name__
                )
        raise NoWorkerError(f"no worker answered {request.path}; {len(able)} serve the model")

    async def finish_session(self, request: web.Request) -> web.Response:
        """Takes SkyRL's message that a trajectory has ended; an unknown session is no error."""
        self._plane.trajectories.finished(request.query.get("session_id", ""), self._callers.job(request))
        return web.json_response({})

    # Turns --------------------------------------------------------------------------------------------------

    async def _read(self, request: web.Request) -> bytes:
        """Returns the whole body. Raises: BodyTooSlow."""
        if request.content.is_eof():  # usually the body came with the head and needs no timer
            return await self._read_all(request)
        try:
            async with asyncio.timeout(self._config.body_s):
                return await self._read_all(request)
        except TimeoutError as error:
            raise BodyTooSlow(f"the body did not arrive within {self._config.body_s:g} s (body_s)") from error

    async def _read_all(self, request: web.Request) -> bytes:
        """Does what request.read() does, without its two extra copies of a long body."""
        pieces, size, limit = [], 0, self._config.max_body_bytes
        while piece := await request.content.readany():
            size += len(piece)
            if size > limit:
                raise web.HTTPRequestEntityTooLarge(limit, size)
            pieces.append(piece)
        return b"".join(pieces)

    async def _route(self, request: web.Request, body: Json) -> Route:
        given = request.headers.get(_TIMEOUT_HEADER)
        job = self._callers.job(request)
        if (asked := self._callers.model(job, body.get("model"))) is not None:
            body["model"] = asked
        model = await self._checks.model(asked)
        return Route(
            job=job,
            explicit_session=explicit_key(request.headers, body),
            model=model,
            run_id=self._callers.run(request, job, model),
            deadline=time.monotonic() + min(_seconds(given), self._config.deadline_s),
            trace_parent=request.headers.get(PARENT_HEADER)
            if self._plane.records.traces is not None
            else None,
        )

    async def forward(self, request: web.Request) -> web.StreamResponse:
        body = parse(await self._read(request))
        return await self._passthrough.forward(request, body, await self._route(request, body))

    def _generating(self, shape: Format) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            """Generates an answer; a turn that is cut continues on another worker."""
            data = await self._read(request)
            body = parse(data, shape.ids_key)
            route = await self._route(request, body)
            if self._goes_whole(shape, body, route.model):
                return await self._passthrough.forward(request, body, route)
            try:
                return await self._generate(request, shape, data, body, route)
            except ChatParsed as found:
                logger.info("chats go whole model=%s reason=%s", route.model, found)
                self._parsed_models.add(route.model)
            return await self._passthrough.forward(request, body, route)

        return handle

    def _goes_whole(self, shape: Format, body: Json, model: str | None) -> bool:
        if isinstance(shape, Chat):
            return model in self._parsed_models or not chat.can_resume(body)
        return isinstance(shape, Completions) and not completions.can_stream(body)

    async def _generate(
        self, request: web.Request, shape: Format, data: bytes, body: Json, route: Route
    ) -> web.StreamResponse:
        """Raises: ChatParsed, while the client has received nothing."""
        call = shape.call(body)
        self._checks.lengths(call, route.model)
        given = request.headers.get(IDEMPOTENCY_HEADER)
        # Another job's request, or one for another run's weights, is never the same.
        key = f"{request.path} {given} {route.run_id} {route.job}" if given is not None else None
        if call.wants_stream:
            if key is not None and key in self._in_flight:
                raise Conflict(f"{IDEMPOTENCY_HEADER}: {given} is in flight; a stream can't be shared")
            return await self._stream(request, shape, call, route)

        async def work() -> SharedAnswer:
            model = await self._plane.turns.complete(call, route, None)
            return SharedAnswer(encode(shape.answer(call, model)))

        shared = await self._in_flight.run(key, data, work)
        return shared.response()

    async def _stream(
        self, request: web.Request, shape: Format, call: Call, route: Route
    ) -> web.StreamResponse:
        sink = _EventStream(request, shape, call)
        try:
            model = await self._plane.turns.complete(call, route, sink)
        except RoseError as error:
            if not sink.answer.prepared:
                raise
            await sink.answer.write(error_event(http_status(error), str(error)))
            return sink.answer
        if (usage := shape.stream_usage(call, model)) is not None:
            await sink.send(usage)
        await sink.answer.write(shape.end)
        return sink.answer


class _EventStream:
    """A client's event stream. It starts with the first event, so that an earlier error has its own
    status."""

    def __init__(self, request: web.Request, shape: Format, call: Call) -> None:
        self._request = request
        self._shape = shape
        self._call = call
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self.answer = web.StreamResponse(headers=headers)

    async def send(self, event: Json) -> None:
        if not self.answer.prepared:
            await self.answer.prepare(self._request)
        await self.answer.write(b"data: %b\n\n" % encode(event))

    async def chunk(self, single: Single, chunk: Chunk, model: str | None) -> None:
        await self.send(self._shape.stream_chunk(self._call, single, chunk, model))

    async def end(self, single: Single, model: str | None) -> None:
        await self.send(self._shape.stream_end(self._call, single, model))


async def _name_server(_request: web.Request, response: web.StreamResponse) -> None:
    """Replaces the `Server` header, in which aiohttp would name its version and Python's."""
    response.headers["Server"] = SERVER_NAME


def _seconds(given: str | None) -> float:
    """Returns the client's timeout, infinity if it set none. Raises: BadRequest."""
    try:
        seconds = float(given) if given is not None else math.inf
    except ValueError as error:
        raise BadRequest(f"{_TIMEOUT_HEADER}: expected seconds, got {str(given)[:40]!r}") from error
    if not seconds > 0:
        raise BadRequest(f"{_TIMEOUT_HEADER}: expected more than 0 seconds, got {given!r}")
    return seconds
