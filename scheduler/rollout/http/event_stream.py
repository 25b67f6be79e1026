"""A client's event stream.

Owns: the events of a streamed answer on their way to the client; which streams have begun.
Promises: the stream starts with the first event, so that an earlier error has its own status. A client that
has left is never taken for a worker that was lost.
Never does: make events (formats/).
"""

from aiohttp import web

from rose.scheduler.rollout.formats.bodies import Json, encode
from rose.scheduler.rollout.formats.completions import ClientCall, Single
from rose.scheduler.rollout.formats.events import Chunk
from rose.scheduler.rollout.formats.shape import Format


class ClientLeft(Exception):
    """The connection to the client is gone."""


class BegunStreams:
    """The streams of which clients have received a part: an error is their last event, and no second
    answer."""

    def __init__(self) -> None:
        self._by_request: dict[int, web.StreamResponse] = {}

    async def note(self, request: web.Request, response: web.StreamResponse) -> None:
        """Notes an answer that begins, if it is a stream."""
        if not isinstance(response, web.Response):
            self._by_request[id(request)] = response

    def of(self, request: web.Request) -> web.StreamResponse | None:
        return self._by_request.get(id(request))

    def forget(self, request: web.Request) -> None:
        """Forgets the stream of a request that has ended, if there is one."""
        self._by_request.pop(id(request), None)


class EventStream:
    def __init__(self, request: web.Request, shape: Format, call: ClientCall) -> None:
        self._request = request
        self._shape = shape
        self._call = call
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self.answer = web.StreamResponse(headers=headers)

    async def send(self, event: Json) -> None:
        """Raises: ClientLeft."""
        try:
            if not self.answer.prepared:
                await self.answer.prepare(self._request)
            await self.answer.write(b"data: %b\n\n" % encode(event))
        except ConnectionError as error:  # the server notices it before it cancels the request
            raise ClientLeft from error

    async def chunk(self, single: Single, chunk: Chunk, model: str | None) -> None:
        await self.send(self._shape.stream_chunk(self._call, single, chunk, model))

    async def end(self, single: Single, model: str | None) -> None:
        await self.send(self._shape.stream_end(self._call, single, model))
