"""What stands before every route: keys, drain, errors as answers.

Owns: the middleware.
Promises: every refusal and every error is OpenAI-shaped; a crash of ours is logged with its traceback and
answered 500.
Never does: know what a route does.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import RawHeaders

from rose.errors import RoseError
from rose.scheduler.rollout.formats.bodies import BadRequest, encode
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.errors import error_body, http_status
from rose.scheduler.rollout.turn.journey import Refused

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_RETRY_AFTER_S = 1
_OPEN_PATHS = ("/health", "/metrics")
_ADMIN_PATHS = ("/admin", "/workers")


class Guard:
    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.is_draining = False
        self._num_active = 0

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keys, drain, and errors as HTTP answers."""
        if not _are_text(request.raw_headers):
            return error_response(400, "a header is not text in UTF-8")
        if not self._is_allowed(request):
            return error_response(401, "wrong or missing key in Authorization")
        if self.is_draining and request.method == "POST" and not request.path.startswith(_ADMIN_PATHS):
            return error_response(503, "the router is shutting down")
        self._num_active += 1
        try:
            return await handler(request)
        except Refused as refused:
            return web.Response(text=refused.body, status=refused.status, content_type="application/json")
        except (RoseError, BadRequest) as error:
            return error_response(http_status(error), str(error))
        except web.HTTPException as error:
            message = f"{request.method} {request.path}: {error.reason}"
            return error_response(error.status, error.text if error.status == 413 and error.text else message)
        except (asyncio.CancelledError, ConnectionError):
            raise  # the client left
        except Exception:
            logger.exception("request failed path=%s", request.path)
            return error_response(500, "the router failed; its log has the reason")
        finally:
            self._num_active -= 1

    def _is_allowed(self, request: web.Request) -> bool:
        if request.path in _OPEN_PATHS:
            return True
        key = self._config.admin_key if request.path.startswith(_ADMIN_PATHS) else self._config.api_key
        if key is None:
            return True
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), key.encode())

    async def drain(self) -> None:
        """Refuse new work and wait for what is in flight, at most `drain_s`."""
        self.is_draining = True
        until = time.monotonic() + self._config.drain_s
        while self._num_active and time.monotonic() < until:
            await asyncio.sleep(0.05)
        logger.info("drained left=%d", self._num_active)


def _are_text(headers: RawHeaders) -> bool:
    """Names of jobs and sessions go into answers, logs and metrics, which other bytes would break."""
    try:
        for _, value in headers:
            if not value.isascii():
                value.decode()
    except UnicodeDecodeError:
        return False
    return True


def error_response(status: int, message: str) -> web.Response:
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status in (429, 503) else None
    body = encode(error_body(status, message))
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
