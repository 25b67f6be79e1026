"""Who asked for a chat: the headers that its turns take along to the router.

Owns an ASGI middleware of the front's API server. Promises that the router sees the key, job, run, session
and patience of the chat's own client, whatever task of vLLM's the turn begins in. Answers 400 to a request
whose headers the router could not read, and changes no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rose.http import FRONT_HEADERS

_TAKEN = frozenset(name.lower().encode() for name in FRONT_HEADERS)
_caller: ContextVar[Mapping[str, str] | None] = ContextVar("rose_caller", default=None)


def caller_headers() -> Mapping[str, str]:
    """Returns the headers of the request in whose context this is called."""
    found = _caller.get()
    return found if found is not None else {}


class NotesCaller:
    """The middleware. Tasks that a request starts inherit its headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                taken = {name.decode(): value.decode() for name, value in scope["headers"] if name in _TAKEN}
            except UnicodeDecodeError:
                error = {"message": "a header is not text in UTF-8", "type": "BadRequestError", "code": 400}
                await JSONResponse({"error": error}, 400)(scope, receive, send)
                return
            _caller.set(taken)
        await self._app(scope, receive, send)
