"""Errors as clients see them.

Owns: the HTTP status of every error, and the shape of an error's body.
Promises: whatever goes wrong, the client gets OpenAI's {"error": {message, type, param, code}}.
Never does: decide that something is an error.
"""

from aiohttp import web

from rose.errors import NoWorkerError, RoseError, WorkerError
from rose.scheduler.rollout.formats.bodies import BadRequest, Json, encode
from rose.scheduler.rollout.placing.versions import VersionGone
from rose.scheduler.rollout.turn.accounts import JobAborted, QueueFull
from rose.scheduler.rollout.turn.dispatch import DeadlineExceeded

_SERVER_NAME = "rose-router"
"""Sent as the `Server` header; it names no version of any library."""
_RETRY_AFTER_S = 1


class NotFound(BadRequest):
    """The request names something that does not exist."""


class Denied(BadRequest):
    """The request is for a job, run or model that its key does not stand for."""


class Conflict(BadRequest):
    """The request contradicts the router's present state."""


class BodyTooSlow(BadRequest):
    """The client did not send its body in time."""


_STATUSES: tuple[tuple[type[Exception], int, str], ...] = (
    (NotFound, 404, "NotFoundError"),
    (Denied, 403, "PermissionDeniedError"),
    (BodyTooSlow, 408, "RequestTimeoutError"),
    (Conflict, 409, "ConflictError"),
    (BadRequest, 400, "BadRequestError"),
    (VersionGone, 409, "ConflictError"),
    (JobAborted, 409, "ConflictError"),
    (QueueFull, 429, "RateLimitError"),
    (WorkerError, 502, "BadGatewayError"),
    (NoWorkerError, 503, "ServiceUnavailableError"),
    (DeadlineExceeded, 504, "TimeoutError"),
)
_NAMES = {status: name for _, status, name in _STATUSES} | {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    431: "HeadersTooLargeError",
}


def http_status(error: RoseError | BadRequest) -> int:
    """Returns the status that a client gets for an error of the router's own."""
    return next((status for kind, status, _ in _STATUSES if isinstance(error, kind)), 500)


def error_body(status: int, message: str, param: str | None = None) -> Json:
    kind = _NAMES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(status: int, message: str, param: str | None = None) -> web.Response:
    headers = {"Server": _SERVER_NAME}
    if status in (429, 503):
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    body = encode(error_body(status, message, param))
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def error_event(status: int, message: str) -> bytes:
    """Returns an error, in vLLM's shape, for an event stream that has begun, and the end of the stream."""
    return b"data: " + encode(error_body(status, message)) + b"\n\ndata: [DONE]\n\n"


async def name_server(_request: web.Request, response: web.StreamResponse) -> None:
    """Replaces the `Server` header, in which aiohttp would name its version and Python's."""
    response.headers["Server"] = _SERVER_NAME
