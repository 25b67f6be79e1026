"""Checks before every route: keys, draining, and errors as answers.

Owns: the middleware, and the answers to requests that are not valid HTTP. Promises: if any key is set, only
the holder of the admin key can change anything under /admin and /workers; that of the members' key can change
what is under /workers. Connections beyond `max_connections` are for these two. Every refusal and every error
has OpenAI's shape; a bug in the router is logged with its traceback and answered 500. No answer names a
library or its version. Never does: know what a route does.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.typedefs import RawHeaders

from rose.errors import RoseError
from rose.http import PUBLISHED_PATH
from rose.scheduler.rollout.formats.bodies import BadRequest, encode
from rose.scheduler.rollout.http.callers import Callers, bearer
from rose.scheduler.rollout.http.errors import error_body, error_event, error_response, http_status
from rose.scheduler.rollout.http.event_stream import ClientLeft, HandledRequests
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.journey import Refused

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_NO_ROOM = (
    b"HTTP/1.1 503 Service Unavailable\r\nServer: rose-router\r\nContent-Type: application/json\r\n"
    b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
)
_NO_ROOM_TEXT = "this router has %d connections open, which is its limit (max_connections); try later"
_OPEN_PATHS = ("/health", "/metrics")
_MEMBER_PATH = "/workers"
_ADMIN_PATHS = ("/admin", _MEMBER_PATH)
_NO_ADMIN_KEY = (
    "this router has keys but no admin key, without which /admin and /workers only show: set admin_key"
    " (ROSE_ROUTER_ADMIN_KEY) at the router, and send that key; trainers take it from the same variable"
)


class Guard:
    def __init__(self, config: RouterConfig, callers: Callers) -> None:
        self._config = config
        self._callers = callers
        self.is_draining = False
        self.handled = HandledRequests()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the key, refuses work while draining, and turns errors into HTTP answers."""
        if not _are_text(request.raw_headers):
            return error_response(400, "a header is not text in UTF-8")
        if self._is_over(request):
            return _no_room(self._config.max_connections)
        if not self._is_allowed(request):
            return error_response(401, "the key in the Authorization header is missing or wrong")
        if self._is_closed(request):
            return error_response(403, _NO_ADMIN_KEY)
        if self._is_too_late(request):
            return error_response(503, "the router is draining and takes no new requests; ask another one")
        self.handled.begin(request)
        try:
            return await handler(request)
        except Refused as refused:
            if self.handled.stream_of(request) is not None:
                return await self._failed(request, refused.status, str(refused))
            return web.Response(text=refused.body, status=refused.status, content_type="application/json")
        except (RoseError, BadRequest) as error:
            param = error.param if isinstance(error, BadRequest) else None
            return await self._failed(request, http_status(error), str(error), param)
        except web.RequestPayloadError as error:  # such as a body that is not what Content-Encoding says
            return error_response(400, f"the body can't be read: {' '.join(str(error).split())}")
        except web.HTTPException as error:
            message = f"{request.method} {request.path}: {error.reason}"
            return error_response(error.status, error.text if error.status == 413 and error.text else message)
        except (asyncio.CancelledError, ConnectionError):
            raise  # the client left
        except ClientLeft as left:
            raise ConnectionResetError("the client left") from left
        except Exception:
            logger.exception("request failed path=%s", request.path)
            return await self._failed(request, 500, "the router failed; its log holds the reason")
        finally:
            self.handled.end(request)

    async def _failed(
        self, request: web.Request, status: int, message: str, param: str | None = None
    ) -> web.StreamResponse:
        """Answers with an error, which is the last event of a stream that has begun."""
        if (begun := self.handled.stream_of(request)) is None:
            return error_response(status, message, param)
        await begun.write(error_event(status, message))
        return begun

    def _is_allowed(self, request: web.Request) -> bool:
        if request.path in _OPEN_PATHS:
            return True
        if not request.path.startswith(_ADMIN_PATHS):
            return self._callers.are_known(request)
        keys = [self._config.admin_key]
        if request.path.startswith(_MEMBER_PATH):
            keys.append(self._config.member_key)
        return not any(keys) or _holds_one_of(request, keys)

    @property
    def _has_keys(self) -> bool:
        """Whether any key but the admin's is set."""
        return self._callers.have_keys or self._config.has_keys

    @property
    def is_open(self) -> bool:
        """Whether no key is set, so that anyone may change everything."""
        return self._config.admin_key is None and not self._has_keys

    def _is_over(self, request: web.Request) -> bool:
        """Whether the connection is one that is kept for admins, and the request is none of theirs."""
        protocol = request.protocol
        if not isinstance(protocol, ClientConnection) or not protocol.is_for_admins:
            return False
        if not request.path.startswith(_ADMIN_PATHS) or not self._is_allowed(request):
            return True
        return self._has_keys and not _holds_one_of(
            request, [self._config.admin_key, self._config.member_key]
        )

    def _is_too_late(self, request: web.Request) -> bool:
        """Whether the request is new work while draining; a front's turn is part of what was accepted, and
        what a trainer has published holds for turns that wait."""
        is_work = request.method == "POST" and not request.path.startswith((*_ADMIN_PATHS, PUBLISHED_PATH))
        if not self.is_draining or not is_work:
            return False
        return not self._callers.is_front(request)

    def _is_closed(self, request: web.Request) -> bool:
        """Whether a stranger could add a worker, to which the router would send its keys and turns, or give a
        job another key, announce weights, end turns."""
        config = self._config
        is_change = request.path.startswith(_ADMIN_PATHS) and request.method != "GET"
        has_own_key = request.path.startswith(_MEMBER_PATH) and config.member_key is not None
        return is_change and self._has_keys and config.admin_key is None and not has_own_key

    async def drain(self) -> None:
        """Refuses new work and waits for the requests in flight, at most `drain_s`."""
        self.is_draining = True
        until = time.monotonic() + self._config.drain_s
        while self.handled and time.monotonic() < until:
            await asyncio.sleep(0.05)
        logger.info("drained left=%d", len(self.handled))


def _holds_one_of(request: web.Request, keys: Sequence[str | None]) -> bool:
    """Whether the request gives one of the keys that are set. Takes as long whichever it is."""
    given = bearer(request).encode()
    return any([hmac.compare_digest(given, key.encode()) for key in keys if key is not None])


class ClientConnection(web.RequestHandler):
    """A client's connection, on which a request that is not valid HTTP is answered like any other error."""

    def __init__(
        self, is_open: set["ClientConnection"], *args: Any, is_for_admins: bool = False, **settings: Any
    ) -> None:
        """is_open: the open connections, which it joins and leaves. is_for_admins: whether it came when there
        was no room for clients."""
        if is_for_admins:  # whoever is refused must not stay by sending on
            settings["lingering_time"] = 0.0
        super().__init__(*args, **settings)
        self._open = is_open
        self.is_for_admins = is_for_admins

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._open.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._open.discard(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers a request that has not reached the middleware."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer has been sent already")
        if isinstance(exc, LineTooLong):
            response = error_response(
                431, "a header or the request line is too long; at most 8190 bytes are allowed"
            )
        elif status < 500:
            reason = " ".join((message or "").split()) or type(exc).__name__
            response = error_response(status, f"the request is not valid HTTP: {reason[:200]}")
        else:
            logger.error("request failed before it was routed", exc_info=exc)
            response = error_response(500, "the router failed; its log holds the reason")
        response.force_close()
        return response


class RefusedConnection(asyncio.Protocol):
    """A connection for which there is no room. It is answered at once, whatever it asks."""

    def __init__(self, most: int) -> None:
        self._body = encode(error_body(503, _NO_ROOM_TEXT % most))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # It can write, although uvloop's classes for TLS derive from none of asyncio's.
        writable = cast(asyncio.WriteTransport, transport)
        writable.write(_NO_ROOM % (len(self._body), self._body))
        writable.close()


def _no_room(most: int) -> web.Response:
    response = error_response(503, _NO_ROOM_TEXT % most)
    response.headers["Retry-After"] = "1"
    response.force_close()
    return response


def _are_text(headers: RawHeaders) -> bool:
    """Names of jobs and sessions go into answers, logs and metrics, which other bytes would break."""
    try:
        for _, value in headers:
            if not value.isascii():
                value.decode()
    except UnicodeDecodeError:
        return False
    return True
