"""Errors as clients see them.

Owns: the status of every error of ours, the OpenAI shape of an error.
Promises: whatever goes wrong, the client gets {"error": {message, type, param, code}}.
Never does: decide that something is an error.
"""

from rose.errors import NoWorkerError, RoseError, WorkerError
from rose.scheduler.rollout.formats.bodies import BadRequest, Json, encode
from rose.scheduler.rollout.placing.versions import VersionGone
from rose.scheduler.rollout.turn.dispatch import DeadlineExceeded, QueueFull


class NotFound(BadRequest):
    """There is nothing of that name."""


class UnknownModel(NotFound):
    """No worker serves the model that was asked for."""


class Conflict(BadRequest):
    """It contradicts what is there already."""


class BodyTooSlow(BadRequest):
    """The client did not send its body in time."""


class JobAborted(RoseError):
    """An operator ended the job's turns."""


_STATUSES: tuple[tuple[type[Exception], int, str], ...] = (
    (NotFound, 404, "NotFoundError"),
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
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
}


def http_status(error: RoseError | BadRequest) -> int:
    """The status a client gets for an error of ours."""
    return next((status for kind, status, _ in _STATUSES if isinstance(error, kind)), 500)


def error_body(status: int, message: str) -> Json:
    kind = _NAMES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_event(status: int, message: str) -> bytes:
    """An error in an event stream that has already begun, in vLLM's shape, and the stream's end."""
    return b"data: " + encode(error_body(status, message)) + b"\n\ndata: [DONE]\n\n"
