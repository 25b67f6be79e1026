"""The clients' routes.

Owns: which route does what, and answering whole or as event streams.
Promises: only the routes listed here and in admin.py exist, so a worker's /rose/v1 and RL routes can't be
reached through the router.
Never does: read requests (intake.py), place turns (turn/), check keys, turn errors into answers (guard.py).
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus

import aiohttp
from aiohttp import web

from rose.errors import NoWorkerError
from rose.scheduler.rollout.formats import chat, completions
from rose.scheduler.rollout.formats.bodies import encode, parse
from rose.scheduler.rollout.formats.chat import Chat, ChatParsed
from rose.scheduler.rollout.formats.completions import ClientCall, Completions
from rose.scheduler.rollout.formats.generate import TokenGenerate
from rose.scheduler.rollout.formats.sglang import SglangGenerate
from rose.scheduler.rollout.formats.shape import Format
from rose.scheduler.rollout.http.admin import Admin
from rose.scheduler.rollout.http.callers import Callers
from rose.scheduler.rollout.http.errors import NotFound, name_server
from rose.scheduler.rollout.http.event_stream import EventStream
from rose.scheduler.rollout.http.fronts import Fronts
from rose.scheduler.rollout.http.guard import Guard, Handler
from rose.scheduler.rollout.http.inflight import IDEMPOTENCY_HEADER, InFlight, SharedAnswer
from rose.scheduler.rollout.http.intake import Asked, Intake
from rose.scheduler.rollout.http.passthrough import RENDER_PATH, Passthrough
from rose.scheduler.rollout.http.shared.changes import AdminChanges
from rose.scheduler.rollout.http.shared.peers import Peers
from rose.scheduler.rollout.placing.views import of_model
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.dataplane import DataPlane
from rose.scheduler.rollout.turn.journey import Route
from rose.scheduler.rollout.workers.registry import openai_headers

logger = logging.getLogger(__name__)

_FORMATS: dict[str, Format] = {
    "/v1/completions": Completions(),
    "/v1/chat/completions": Chat(),
    "/inference/v1/generate": TokenGenerate(),
    "/generate": SglangGenerate(),
}
_QUESTION_PATHS = {"/tokenize": "prompt", "/detokenize": "tokens", "/v1/messages/count_tokens": "prompt"}
"""The paths, each with the field that may hold a long list."""
_FINISH_PATH = "/finish_session"


class Service:
    def __init__(self, config: RouterConfig, plane: DataPlane) -> None:
        self._config = config
        self._plane = plane
        self._passthrough = Passthrough(plane)
        self._callers = Callers(plane.registry, plane.jobs, config.api_key, config.run_id)
        self._intake = Intake(
            config, plane.registry, self._callers, are_traced=plane.records.traces is not None
        )
        self._guard = Guard(config, self._callers)
        self._in_flight = InFlight()
        self.changes = AdminChanges(plane)
        self.peers = Peers(plane, self.changes)
        self.fronts = Fronts(config.fronts, self._callers.front_key, self._callers.front_secret)
        self._parsed_models: set[str | None] = set()
        """The models whose chats a parser in the workers splits into reasoning and tool calls."""

    def build_app(self) -> web.Application:
        app = web.Application(
            client_max_size=self._config.max_body_bytes, middlewares=[self._guard.middleware]
        )
        app.on_response_prepare.append(name_server)
        app.on_response_prepare.append(self._guard.handled.note_stream)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        for path, shape in _FORMATS.items():
            app.router.add_post(path, self._generating(shape))
        app.router.add_post("/v1/responses", self.through_a_front)
        app.router.add_post("/v1/messages", self.through_a_front)
        app.router.add_post(RENDER_PATH, self.forward)
        for path in _QUESTION_PATHS:
            app.router.add_post(path, self.ask)
        app.router.add_post(_FINISH_PATH, self.finish_session)
        Admin(self._plane, self._guard, self._callers, self.changes, self.peers).add_routes(app)
        return app

    async def drain(self) -> None:
        """Refuses new work and waits for the requests in flight, at most `drain_s`."""
        await self._guard.drain()

    async def health(self, _request: web.Request) -> web.Response:
        """Answers 200 while some worker is alive and the router takes requests, else 503."""
        workers = self._plane.registry.workers()
        num_alive = sum(worker.is_alive for worker in workers)
        is_draining = self._guard.is_draining
        is_up = num_alive > 0 and not is_draining
        found = {"workers": len(workers), "alive": num_alive, "fronts": self.fronts.num_ready}
        found["draining"] = is_draining
        return web.json_response(found, status=200 if is_up else 503)

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
        body = await self._intake.read(request)
        model = await self._intake.model(parse(body, _QUESTION_PATHS[request.path]).get("model"))
        able = of_model(model, self._plane.registry.workers())
        for worker in sorted((w for w in able if w.is_alive), key=lambda w: w.in_flight):
            url = f"{worker.spec.url}{request.path}"
            headers = {**openai_headers(self._config), "Content-Type": "application/json"}
            timeout = aiohttp.ClientTimeout(total=self._config.first_token_s)
            try:
                async with self._plane.http.post(
                    url, data=body, headers=headers, timeout=timeout
                ) as response:
                    if response.status == HTTPStatus.UNAUTHORIZED:
                        logger.warning("worker=%s wants another key than worker_api_key", worker.id)
                        continue
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

    async def forward(self, request: web.Request) -> web.StreamResponse:
        asked = await self._intake.admit(request)
        return await self._passthrough.forward(request, asked.body, asked.route)

    async def through_a_front(self, request: web.Request) -> web.StreamResponse:
        """Hands a request in a format of vLLM's own to a front, which sends its turns back here."""
        asked = await self._intake.admit(request)
        base_of, model = self._plane.registry.base_of, asked.route.model
        if not self.fronts.are_configured or not self.fronts.serve(base_of(model)):
            raise NotFound(
                f"{request.path}: only a front understands it; start the router with --front 1 -- --model DIR"
            )
        return await self._once(
            request, asked, lambda: self.fronts.forward(request, asked.body, asked.route.deadline)
        )

    def _generating(self, shape: Format) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            """Generates an answer; a turn that is cut continues on another worker."""
            asked = await self._intake.admit(request, shape.ids_key)
            if not self._goes_whole(shape, asked):
                try:
                    return await self._generate(request, shape, asked)
                except ChatParsed as found:
                    model = asked.route.model
                    logger.info("chats go whole model=%s reason=%s", model, found)
                    self._parsed_models.add(model)
            return await self._once(request, asked, lambda: self._whole(request, shape, asked))

        return handle

    async def _whole(self, request: web.Request, shape: Format, asked: Asked) -> web.StreamResponse:
        if isinstance(shape, Chat):
            try:
                if self._is_for_front(asked):
                    return await self.fronts.forward(request, asked.body, asked.route.deadline)
            except NoWorkerError as error:
                logger.info("a chat goes whole reason=%s", error)
        return await self._passthrough.forward(request, asked.body, asked.route)

    async def _once(
        self, request: web.Request, asked: Asked, answered: Callable[[], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Returns what `answered()` does, or what it does for the same request that is in flight. A stream
        takes the place of the one that is in flight."""
        key = _key(request, asked.route)
        if key is None:
            return await answered()
        if asked.body.get("stream"):
            async with self._in_flight.stream(key, asked.body):
                return await answered()

        async def work() -> SharedAnswer:
            return SharedAnswer.of(await answered())

        return (await self._in_flight.run(key, asked.data, work)).response()

    def _is_for_front(self, asked: Asked) -> bool:
        """Whether fronts serve the chat's model, and a worker knows where the turn's grammar begins.

        Raises: NoWorkerError if the model is a LoRA adapter that no worker holds.
        """
        body, model = asked.body, asked.route.model
        if not self.fronts.are_configured or not chat.suits_front(body):
            return False
        if not self.fronts.serve(self._plane.registry.base_of(model)):
            return False
        return not chat.must_follow_grammar(body) or self._plane.dispatcher.have_takers(model)

    def _goes_whole(self, shape: Format, asked: Asked) -> bool:
        if isinstance(shape, Chat):
            return asked.route.model in self._parsed_models or not chat.can_resume(asked.body)
        return isinstance(shape, Completions) and not completions.can_stream(asked.body)

    async def _generate(self, request: web.Request, shape: Format, asked: Asked) -> web.StreamResponse:
        """Raises: ChatParsed, while the client has received nothing."""
        route = asked.route
        key = _key(request, route)
        needs_room = key is None or key not in self._in_flight  # a retry gets that of the first one
        check_room = partial(self._plane.dispatcher.check_room, route.job) if needs_room else None
        call = self._intake.call(shape, asked, check_room)
        if call.wants_stream:
            if key is None:
                return await self._stream(request, shape, call, route)
            async with self._in_flight.stream(key, asked.body):
                return await self._stream(request, shape, call, route)

        async def work() -> SharedAnswer:
            model = await self._plane.turns.complete(call, route, None)
            return SharedAnswer(encode(shape.answer(call, model)))

        shared = await self._in_flight.run(key, asked.data, work)
        return shared.response()

    async def _stream(
        self, request: web.Request, shape: Format, call: ClientCall, route: Route
    ) -> web.StreamResponse:
        sink = EventStream(request, shape, call)
        model = await self._plane.turns.complete(call, route, sink)
        if (usage := shape.stream_usage(call, model)) is not None:
            await sink.send(usage)
        await sink.answer.write(shape.end)
        return sink.answer


def _key(request: web.Request, route: Route) -> str | None:
    """Returns the key by which requests share an answer; None if the client gave none. Requests of other
    jobs, or for other runs' weights, have other keys."""
    given = request.headers.get(IDEMPOTENCY_HEADER)
    return f"{request.path} {given} {route.run_id} {route.job}" if given is not None else None
