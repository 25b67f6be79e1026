"""A client's event stream.

Owns: the events of a streamed answer on their way to the client.
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
