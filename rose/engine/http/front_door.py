"""What ROSE does with each generation request before vLLM's API server sees it, and with the answer.

Owns the ASGI middleware of one engine. Promises that a request which does not concern ROSE passes unchanged.
Never tokenizes or queues a request, and delays one only if a place is about to become free.
"""

from __future__ import annotations

import json
from typing import Any

from starlette._utils import get_route_path
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rose.engine.http.activation import INACTIVE
from rose.engine.http.control import ServedEngine
from rose.engine.http.leases import Leases, begun
from rose.engine.http.prompt_ids import without_prompt_ids
from rose.engine.scheduling.request_keys import KEYS, TENANT_HEADER, TENANT_KEY, key_problem, tenant_problem
from rose.http import LEASE_HEADER, NO_LEASE

_GENERATE = "/inference/v1/generate"
_PATHS = ("/v1/", _GENERATE, "/invocations")
"""How the paths of all routes that generate begin. /invocations takes any body of /v1's. vLLM 0.32."""
_KEYS = tuple(key.encode() for key in KEYS)
_XARGS = "vllm_xargs"
_SAMPLING, _EXTRA = "sampling_params", "extra_args"
"""Where /inference/v1/generate has its parameters, and what is called vllm_xargs elsewhere."""
_HEADER = TENANT_HEADER.lower().encode()
_LEASE = LEASE_HEADER.lower().encode()
_NO_PROMPT_LOGPROBS = (
    "prompt_logprobs, or echo with logprobs: an engine on a CPU with --enable-lora can't make these; ask an"
    " engine without adapters"
)


class FrontDoor:
    """ASGI middleware that sees each generation request as it reaches this API server.

    - It rings the board. The engine core sees a request only after tokenization and a queue, and not at all
      while its scheduler waits for a rollout step; the bell ends that wait.
    - While the engine is inactive it answers 503. The scheduler would end the request as well, but a router
      can tell a 503 from a turn that was lost.
    - It answers 400 to a request whose own SLO is no latency, or whose tenant is no name. vLLM does not look
      at these values.
    - It answers 400 to a request for a prompt's log-probabilities where these would end the engine.
    - It writes the tenant of an ``X-Rose-Tenant`` header into the body, where the scheduler finds it. A
      gateway sets the header, so it wins over the body's key.
    - It counts the turns of each router, and answers 503 to one that its router's lease has no room for.
    - It leaves the prompt's token ids out of the answer if the request asks for that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and get_route_path(scope).startswith(_PATHS):
            control: ServedEngine | None = getattr(scope["app"].state, "rose", None)
            if control is not None:
                if not control.is_active:
                    await _error(503, "ServiceUnavailable", INACTIVE)(scope, receive, send)
                    return
                control.announce_arrival()
                messages = await _read(receive)
                tenant = _header_tenant(scope)
                wrong_name = tenant_problem(TENANT_HEADER, tenant) if tenant is not None else None
                problem = wrong_name if wrong_name is not None else _key_problem(messages)
                if problem is None and control.fails_prompt_logprobs:
                    problem = _prompt_logprobs_problem(messages)
                if problem is not None:
                    await _error(400, "BadRequestError", problem)(scope, receive, send)
                    return
                if tenant is not None and _is_whole(messages):
                    scope, messages = _with_tenant(scope, messages, tenant)
                receive = _replayed(messages, receive)
                send = without_prompt_ids(scope, send)
                given = dict(scope["headers"]).get(_LEASE)
                if given is not None and control.leases is not None:
                    await self._leased(given.decode(errors="replace"), control.leases, scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _leased(self, given: str, leases: Leases, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs a router's turn under its lease."""
        name, _, fence = given.rpartition(" ")
        if not name or not fence.isdecimal():
            problem = f"{LEASE_HEADER}: {given[:80]!r}: send ROUTER FENCE"
            await _error(400, "BadRequestError", problem)(scope, receive, send)
            return
        if (refusal := await begun(leases, name, int(fence))) is not None:
            await _error(503, NO_LEASE, refusal)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            leases.end(name)


def _error(status: int, kind: str, message: str) -> JSONResponse:
    """An error in the OpenAI API's form."""
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


async def _read(receive: Receive) -> list[Message]:
    """Returns the messages of the request's whole body, or those up to the client's departure."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _replayed(messages: list[Message], receive: Receive) -> Receive:
    """A ``receive`` that begins with the messages that were read already."""
    left = iter(messages)

    async def replay() -> Message:
        for message in left:
            return message
        return await receive()

    return replay


def _header_tenant(scope: Scope) -> str | None:
    """Returns the tenant that the request's header names; None if it has no such header."""
    values = [value for name, value in scope["headers"] if name == _HEADER]
    return values[-1].decode(errors="backslashreplace") if values else None


def _is_whole(messages: list[Message]) -> bool:
    return messages[-1]["type"] == "http.request"


def _with_tenant(scope: Scope, messages: list[Message], tenant: str) -> tuple[Scope, list[Message]]:
    """Returns the request with the tenant in its body. A body that is no JSON object stays as it is: vLLM
    answers it, or it is a form, which has no such key."""
    body = b"".join(message.get("body", b"") for message in messages)
    try:
        fields = json.loads(body)
        is_generate = get_route_path(scope).startswith(_GENERATE)
        holder, name = (fields[_SAMPLING], _EXTRA) if is_generate else (fields, _XARGS)
        holder[name] = {**(holder.get(name) or {}), TENANT_KEY: tenant}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return scope, messages
    body = json.dumps(fields).encode()
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    length = (b"content-length", str(len(body)).encode())
    return {**scope, "headers": [*headers, length]}, [{"type": "http.request", "body": body}]


def _prompt_logprobs_problem(messages: list[Message]) -> str | None:
    """Returns what is wrong with a request that asks for its prompt's log-probabilities. Only a body that may
    do so is parsed."""
    body = b"".join(message.get("body", b"") for message in messages)
    if b'"prompt_logprobs"' not in body and b'"echo"' not in body:
        return None
    try:
        fields = json.loads(body)
        is_echo = bool(fields.get("echo")) and fields.get("logprobs") not in (None, False)
        given = (fields.get("prompt_logprobs"), _sampling_params(fields).get("prompt_logprobs"))
        asks = given != (None, None) or is_echo
    except (ValueError, AttributeError, RecursionError):
        return None  # vLLM answers a body that is no such object
    return _NO_PROMPT_LOGPROBS if asks else None


def _key_problem(messages: list[Message]) -> str | None:
    """Returns what is wrong with ROSE's keys in a request's body. Only a body that has one is parsed."""
    body = b"".join(message.get("body", b"") for message in messages)
    if not any(key in body for key in _KEYS):
        return None
    try:
        fields = json.loads(body)
        given = (fields.get(_XARGS), _sampling_params(fields).get(_EXTRA))
    except (ValueError, AttributeError, RecursionError):
        return None  # vLLM answers a body that is no such object
    problems = (key_problem(each) for each in given if isinstance(each, dict))
    return next((each for each in problems if each is not None), None)


def _sampling_params(fields: dict[str, Any]) -> dict[str, Any]:
    given = fields.get(_SAMPLING)
    return given if isinstance(given, dict) else {}
