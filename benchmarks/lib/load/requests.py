"""Loads an HTTP server with completions and says how long each took.

Owns: requests written by hand over kept-alive connections, so that the client hardly shows.
Promises: a latency is from the first byte sent to the last byte received; an open loop keeps to its schedule,
and says how late it was where it could not.
Never: judges.
"""

import asyncio
import gc
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from lib.cpu_times import Times, read_times
from rose.errors import WorkerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go."""

    url: str
    path: str = "/v1/completions"

    def request(self, body: bytes, headers: str = "") -> bytes:
        host = urlsplit(self.url).netloc
        lines = f"POST {self.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        return f"{lines}{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


class LoadConnection:
    """One kept-alive connection."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: bytes) -> float:
        """Send a request, read the whole answer; the seconds it took. Raises: WorkerError if it failed."""
        if self._streams is None:
            parts = urlsplit(self._target.url)
            trusts = ssl._create_unverified_context() if parts.scheme == "https" else None
            self._streams = await asyncio.open_connection(parts.hostname, parts.port, limit=2**22, ssl=trusts)
        reader, writer = self._streams
        began = time.perf_counter()
        writer.write(request)
        await _read_answer(reader)
        return time.perf_counter() - began

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def _read_answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head[:20]:
        raise WorkerError(f"answered {head[:200].decode(errors='replace')!r}")
    if b"transfer-encoding: chunked" not in head:
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        return
    while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:
        await reader.readexactly(size + 2)
    await reader.readexactly(2)


async def closed_loop(target: Target, requests: Sequence[bytes], concurrency: int) -> list[float]:
    """All requests, this many at a time."""
    left = iter(requests)
    latencies: list[float] = []

    async def work() -> None:
        connection = LoadConnection(target)
        try:
            for request in left:
                latencies.append(await connection.send(request))
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return latencies


class Clock:
    """Reads a process's times, as the kernel's scheduler counts them."""

    def __init__(self, pid: int) -> None:
        self._path = f"/proc/{pid}/schedstat"

    def read(self) -> Times:
        return read_times(self._path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request of an open loop."""

    latency_s: float
    late_s: float
    """How late the client itself sent it; no part of the latency."""
    took: tuple[Times, ...]
    """What each process that is watched did during it."""


async def open_loop(
    targets: Sequence[tuple[Target, Sequence[bytes]]], per_s: float, clocks: Sequence[Clock] = ()
) -> list[list[Sample]]:
    """Samples per target of requests at a fixed rate each, to the targets in turn: their drift is shared."""
    idle: list[list[LoadConnection]] = [[] for _ in targets]
    samples: list[list[Sample]] = [[] for _ in targets]
    began = time.perf_counter()

    async def send(index: int, request: bytes, due: float) -> None:
        connection = idle[index].pop() if idle[index] else LoadConnection(targets[index][0])
        before = [clock.read() for clock in clocks]
        late_s = time.perf_counter() - due
        latency_s = await connection.send(request)
        pairs = zip(before, [clock.read() for clock in clocks], strict=True)
        took = tuple(
            Times(ran_s=then.ran_s - first.ran_s, waited_s=then.waited_s - first.waited_s)
            for first, then in pairs
        )
        samples[index].append(Sample(latency_s=latency_s, late_s=late_s, took=took))
        idle[index].append(connection)

    rounds = zip(*(requests for _, requests in targets), strict=True)
    with _no_garbage_collection():
        async with asyncio.TaskGroup() as group:
            for number, requests in enumerate(rounds):
                for index, request in enumerate(requests):
                    due = began + (number + index / len(targets)) / per_s
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    group.create_task(send(index, request, due))
    for connections in idle:
        for connection in connections:
            connection.close()
    return samples


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The client's own pauses, of up to 4 ms, would be found in the slowest latencies."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
