"""A client's event stream.

Owns: the events of a streamed answer on their way to the client; which streams have begun.
Promises: the stream starts with the first event, so that an earlier error has its own status. A client that
has left is never taken for a worker or a front that was lost.
Never does: make events (formats/).
"""

from aiohttp import web

from rose.scheduler.rollout.formats.bodies import Json, encode
from rose.scheduler.rollout.formats.completions import ClientCall, Single
from rose.scheduler.rollout.formats.events import Chunk
from rose.scheduler.rollout.formats.shape import Format


class ClientLeft(Exception):
    """The connection to the client is gone."""


async def hand_on(request: web.Request, answer: web.StreamResponse, data: bytes) -> None:
    """Sends the next part of a stream, after its head if it has not begun. Raises: ClientLeft."""
    try:
        if not answer.prepared:
            await answer.prepare(request)
        await answer.write(data)
    except ConnectionError as error:  # the server notices it before it cancels the request
        raise ClientLeft from error


class HandledRequests:
    """The requests that are being handled, each with its stream once that has begun: an error is then the
    stream's last event, and no second answer."""

    def __init__(self) -> None:
        self._streams: dict[int, web.StreamResponse | None] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, request: web.Request) -> None:
        self._streams[id(request)] = None

    def end(self, request: web.Request) -> None:
        del self._streams[id(request)]

    async def note_stream(self, request: web.Request, answer: web.StreamResponse) -> None:
        """Notes an answer that begins, if it is a stream. An empty one begins when its request has ended."""
        if id(request) in self._streams and not isinstance(answer, web.Response):
            self._streams[id(request)] = answer

    def stream_of(self, request: web.Request) -> web.StreamResponse | None:
        """Returns the stream that has begun; None if none has."""
        return self._streams[id(request)]


class EventStream:
    def __init__(self, request: web.Request, shape: Format, call: ClientCall) -> None:
        self._request = request
        self._shape = shape
        self._call = call
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self.answer = web.StreamResponse(headers=headers)

    async def send(self, event: Json) -> None:
        """Raises: ClientLeft."""
        await hand_on(self._request, self.answer, b"data: %b\n\n" % encode(event))

    async def chunk(self, single: Single, chunk: Chunk, model: str | None) -> None:
        await self.send(self._shape.stream_chunk(self._call, single, chunk, model))

    async def end(self, single: Single, model: str | None) -> None:
        await self.send(self._shape.stream_end(self._call, single, model))
