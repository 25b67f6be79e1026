"""What ROSE does with each generation request before vLLM's API server sees it, and with the answer.

Owns the ASGI middleware of one engine. Promises that a request which ROSE has nothing to say about passes
unchanged. Never tokenizes, queues or delays a request.
"""

from __future__ import annotations

import json

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rose.engine.http.activation import INACTIVE
from rose.engine.http.control import EngineControl
from rose.engine.http.prompt_ids import without_prompt_ids
from rose.engine.scheduling.request_keys import KEYS, key_problem

_KEYS = tuple(key.encode() for key in KEYS)


class FrontDoor:
    """ASGI middleware that sees each generation request as it reaches this API server.

    - It rings the board. The engine core sees a request only after tokenization and a queue, and not at all
      while its scheduler waits for a rollout step; the bell ends that wait.
    - While the engine is inactive it answers 503. The scheduler would end the request as well, but a router
      can tell a 503 from a turn that was lost.
    - It answers 400 to a request whose own SLO is no latency, or whose tenant is no name. vLLM does not look
      at these values.
    - It leaves the prompt's token ids out of the answer if the request asks for that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            control: EngineControl | None = getattr(scope["app"].state, "rose", None)
            if control is not None:
                if not control.is_active:
                    await _error(503, "ServiceUnavailable", INACTIVE)(scope, receive, send)
                    return
                control.announce_arrival()
                messages = await _read(receive)
                if (problem := _key_problem(messages)) is not None:
                    await _error(400, "BadRequestError", problem)(scope, receive, send)
                    return
                receive = _replayed(messages, receive)
                send = without_prompt_ids(scope, send)
        await self._app(scope, receive, send)


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


def _key_problem(messages: list[Message]) -> str | None:
    """Returns what is wrong with ROSE's keys in a request's body. Only a body that has one is parsed."""
    body = b"".join(message.get("body", b"") for message in messages)
    if not any(key in body for key in _KEYS):
        return None
    try:
        extra_args = json.loads(body)["vllm_xargs"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None  # vLLM answers a body that is no such object
    return key_problem(extra_args) if isinstance(extra_args, dict) else None
