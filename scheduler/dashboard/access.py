"""Who may read the dashboard.

Owns: the key's check. Promises: if a key is set, every route requires it. A browser asks its user for it,
with any name, and programs send it as a bearer token.
"""

import base64
import binascii
import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

_ASKS = {"WWW-Authenticate": 'Basic realm="rose sched", charset="UTF-8"', "Cache-Control": "no-store"}
_REFUSAL = "missing or wrong key: give $ROSE_DASHBOARD_KEY as the password, or as a bearer token"


def asks_for(key: str | None) -> Middleware:
    """Returns what lets requests with the key through; None lets everybody in. White space around the key, as
    files of secrets have it, is no part of it."""
    wanted = key.strip().encode(errors="surrogateescape") if key is not None else None

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if wanted is None or hmac.compare_digest(_given(request), wanted):
            return await handler(request)
        return web.Response(status=401, text=_REFUSAL, headers=_ASKS)

    return check


def _given(request: web.Request) -> bytes:
    """Returns the bearer token, or the password; nothing if there is neither."""
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    given = value.strip().encode(errors="surrogateescape")
    if scheme.lower() == "bearer":
        return given
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
