"""A TCP proxy before a worker that breaks one answer in the middle, after a number of streamed events."""

import asyncio
import contextlib
from typing import Self

EVENT = b"data: {"
READ_BYTES = 1 << 16


class CuttingProxy:
    """Stands before ``worker_url``; the first answer of more than ``num_events`` events ends after so many.

    The cut depends on what has passed and on nothing else. Everything else passes untouched: ask again until
    it `has_cut`, as an engine whose front end is held up puts several tokens into one event.
    """

    def __init__(self, worker_url: str, num_events: int) -> None:
        self._host, self._port = worker_url.removeprefix("http://").split(":")
        self._num_events = num_events
        self.has_cut = False
        self._round = 0
        self._connections: set[asyncio.Task[None]] = set()

    def arm(self, num_events: int) -> None:
        """Cuts one more answer, and counts only the events from now on."""
        self._num_events, self.has_cut = num_events, False
        self._round += 1

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        if this := asyncio.current_task():
            self._connections.add(this)
        try:
            far, to_far = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            to_near.close()  # as the worker itself would refuse
            return
        asking = asyncio.create_task(self._copy(near, to_far))
        try:
            await self._copy_answers(far, to_near)
        finally:
            asking.cancel()
            to_near.close()
            to_far.close()

    @staticmethod
    async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await source.read(READ_BYTES):
                sink.write(chunk)
                await sink.drain()
            sink.write_eof()

    async def _copy_answers(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        passed, counted = b"", self._round
        with contextlib.suppress(ConnectionError):
            while chunk := await source.read(READ_BYTES):
                if counted != self._round:
                    passed, counted = b"", self._round
                begin = len(passed)
                passed += chunk
                *events, after = passed.split(EVENT, self._num_events + 1)
                if len(events) > self._num_events and not self.has_cut:
                    self.has_cut = True
                    sink.write(passed[begin : len(passed) - len(EVENT + after)])
                    await sink.drain()
                    return
                sink.write(chunk)
                await sink.drain()
