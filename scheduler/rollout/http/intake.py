"""What a client's request asks for.

Owns: reading a body within its bounds; the caller, job, model, run and deadline of a request.
Promises: a request that is refused here would fail on every worker. One that passes may still be refused by a
worker.
Never does: ask a worker for tokens.
"""

import asyncio
import math
import time
from typing import NamedTuple

from aiohttp import web

from rose.errors import NoWorkerError
from rose.http import TIMEOUT_HEADER
from rose.scheduler.rollout.formats.bodies import BadRequest, Json, TokenIds, parse
from rose.scheduler.rollout.formats.completions import CheckRoom, ClientCall, take_whole_numbers
from rose.scheduler.rollout.formats.resume import ROUTERS_ARGUMENTS
from rose.scheduler.rollout.formats.shape import Format
from rose.scheduler.rollout.http.callers import Callers
from rose.scheduler.rollout.http.errors import BodyTooSlow, NotFound
from rose.scheduler.rollout.placing.sessions import explicit_key
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.journey import Route
from rose.scheduler.rollout.turn.traces import PARENT_HEADER
from rose.scheduler.rollout.workers.registry import Registry

_MOST_CHARACTERS = 1024
"""The limit of a session's name. Names are kept for as many sessions as max_sessions."""
_NEAR = 0.7
"""A prompt whose estimated length is below this fraction of the context is not counted."""


class Asked(NamedTuple):
    """A request as its client sent it, and the way that it may take."""

    data: bytes
    body: Json
    route: Route


class Intake:
    def __init__(
        self, config: RouterConfig, registry: Registry, callers: Callers, *, are_traced: bool
    ) -> None:
        """`are_traced`: turns are written down as spans."""
        self._config = config
        self._registry = registry
        self._callers = callers
        self._are_traced = are_traced

    async def admit(self, request: web.Request, ids_key: str = "prompt") -> Asked:
        """Reads a request for tokens; `ids_key`: its field that may hold a long list of ids.

        Raises:
            BadRequest, BodyTooSlow, Denied, NotFound, NoWorkerError: it can't be understood, or asks for what
                the caller may not have or no worker has.
        """
        data = await self.read(request)
        body = parse(data, ids_key)
        take_whole_numbers(body)
        _check_arguments(body)
        job = self._callers.job(request)
        if (asked := self._callers.model(job, body.get("model"))) is not None:
            body["model"] = asked
        model = await self.model(asked)
        session = explicit_key(request.headers, body)
        if session is not None and len(session) > _MOST_CHARACTERS:
            raise BadRequest(f"session: {len(session)} characters; at most {_MOST_CHARACTERS} are allowed")
        route = Route(
            job=job,
            explicit_session=session,
            model=model,
            run_id=self._callers.run(request, job, model),
            deadline=time.monotonic() + min(_timeout_s(request), self._config.deadline_s),
            trace_parent=request.headers.get(PARENT_HEADER) if self._are_traced else None,
        )
        return Asked(data, body, route)

    def call(self, shape: Format, asked: Asked, check_room: CheckRoom | None) -> ClientCall:
        """Splits a request into its turns. Raises: BadRequest, ChatParsed; what `check_room` raises."""
        call = shape.call(asked.body, check_room)
        self._check_lengths(call, asked.route.model)
        return call

    async def read(self, request: web.Request) -> bytes:
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

    async def model(self, given: object) -> str | None:
        """Returns the model that a request with `given` as its `model` is for; None: any worker will do.

        Raises:
            BadRequest: `given` is not a name, or it is missing where workers serve different models.
            NotFound: no worker serves the model.
            NoWorkerError: all workers that served the model were removed.
        """
        catalogue = self._registry.catalogue
        if given is None:
            return catalogue.default()
        if not isinstance(given, str):
            raise BadRequest(f"model: expected a name, got {given!r}")
        if self._is_known(given) or self._may_serve_any():
            return given
        await self._registry.refresh_models()  # the model may have been loaded meanwhile
        if self._is_known(given):
            return given
        if catalogue.is_removed(given):
            raise NoWorkerError(f"all workers that served model {given} were removed")
        raise NotFound(f"model {given} is served by no worker; known: {', '.join(catalogue.names)}")

    def _is_known(self, model: str) -> bool:
        """Whether a worker serves the model, or held it as an adapter: a restarted one gets that again."""
        catalogue, newest = self._registry.catalogue, self._registry.newest
        return model in catalogue or (newest.is_adapter(model) and not catalogue.is_removed(model))

    def _may_serve_any(self) -> bool:
        """Whether some live worker doesn't say what it serves, or no worker is alive."""
        alive = [worker for worker in self._registry.workers() if worker.is_alive]
        return not alive or any(worker.models is None for worker in alive)

    def _check_lengths(self, call: ClientCall, model: str | None) -> None:
        """Raises: BadRequest if a prompt or its answer does not fit into any worker's context, in vLLM's
        words, by which some clients know this error."""
        limit = self._registry.catalogue.context(model)
        if limit is None:
            return
        asked = call.singles[0].generation.request.get("max_tokens")
        if asked is not None and asked > limit:
            raise BadRequest(
                f"max_tokens={asked} cannot be greater than max_model_len={limit}. Please request fewer"
                " output tokens.",
                "max_tokens",
            )
        if call.body.get("truncate_prompt_tokens"):
            return
        for single in call.singles[:: call.n]:
            prompt = single.prompt
            if isinstance(prompt, TokenIds) and prompt.about() > _NEAR * limit and prompt.count() >= limit:
                raise _too_long(prompt.count(), limit)


def _too_long(num_tokens: int, limit: int) -> BadRequest:
    if num_tokens == limit:
        return BadRequest(
            f"The decoder prompt (length {num_tokens}) plus the number of requested output tokens (at least"
            f" 1) is longer than the maximum model length of {limit}.",
            "input_tokens",
        )
    return BadRequest(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {num_tokens}"
        " input tokens, which exceeds this limit even without any output tokens. Please reduce the length of"
        " the input prompt.",
        "input_tokens",
    )


def _check_arguments(body: Json) -> None:
    """Raises: BadRequest for an argument that only the router may send to engines."""
    for holder in (body, body.get("sampling_params")):
        for field in ("vllm_xargs", "extra_args"):
            given = holder.get(field) if isinstance(holder, dict) else None
            for name in ROUTERS_ARGUMENTS:
                if isinstance(given, dict) and name in given:
                    raise BadRequest(f"{field}.{name}: the router itself tells engines this; leave it out")


def _timeout_s(request: web.Request) -> float:
    """Returns the client's timeout, infinity if it set none. Raises: BadRequest."""
    given = request.headers.get(TIMEOUT_HEADER)
    try:
        seconds = float(given) if given is not None else math.inf
    except ValueError as error:
        raise BadRequest(f"{TIMEOUT_HEADER}: expected seconds, got {str(given)[:40]!r}") from error
    if not seconds > 0:
        raise BadRequest(f"{TIMEOUT_HEADER}: expected more than 0 seconds, got {given!r}")
    return seconds
