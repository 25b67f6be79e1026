"""The HTTP client of turns: answers cut anywhere, connections kept or closed, servers that break off."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from yarl import URL

from rose.scheduler.rollout.workers import wire as wire_module
from rose.scheduler.rollout.workers.wire import NotConnected, Wire, WorkerConnection

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone"
TRUSTS = ssl.create_default_context()
Reply = Callable[[int], list[bytes]]


class Server:
    """Answers the n-th request with `reply(n)`'s pieces, one write each, then closes if it `closes`."""

    def __init__(self, reply: Reply, closes: bool) -> None:
        self._reply = reply
        self.closes = closes
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_ended = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self._reply(len(self.requests)):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self.num_ended += 1
            writer.close()


@asynccontextmanager
async def serving(reply: Reply, closes: bool = False) -> AsyncIterator[tuple[Server, Wire, URL]]:
    server, wire = Server(reply, closes), Wire(TRUSTS)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    url = URL(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/completions")
    wire.keep(url)
    try:
        yield server, wire, url
    finally:
        wire.close()
        listening.close()


async def ask(wire: Wire, url: URL, body: bytes = b"{}") -> tuple[int, str]:
    half = len(body) // 2
    answer = await wire.post(url, b"Authorization: Bearer k\r\n", [body[:half], body[half:]])
    try:
        return answer.status, await answer.text()
    finally:
        wire.done(url, answer)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_an_answer_is_whole_however_it_is_cut_and_its_connection_is_used_again(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_module, "KEEPALIVE_S", 3600.0)  # or a moment's stall opens another one
    pieces = [CHUNKED[i : i + size] for i in range(0, len(CHUNKED), size)]
    async with serving(lambda _: pieces) as (server, wire, url):
        for body in (b"{}", b"x" * 100_000):
            assert await ask(wire, url, body) == (200, "hello world")
            assert server.requests[-1].endswith(body)
        assert server.num_connections == 1
        assert b"POST /v1/completions HTTP/1.1\r\n" in server.requests[0]
        assert b"Authorization: Bearer k\r\n" in server.requests[0]


async def test_errors_have_their_text_and_a_100_is_not_the_answer() -> None:
    async with serving(lambda _: [b"HTTP/1.1 100 Continue\r\n\r\n", NOT_FOUND]) as (_, wire, url):
        assert await ask(wire, url) == (404, "none")


async def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    closing = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    async with serving(lambda _: [closing]) as (server, wire, url):
        for _ in range(2):
            assert (await ask(wire, url))[0] == 200
        assert server.num_connections == 2


@pytest.mark.parametrize(
    "pieces",
    [[], [CHUNKED[:30]], [CHUNKED[:60]], [b"SSH-2.0-OpenSSH_9\r\n\r\n"], [CHUNKED[:50] + b"nonsense\r\n"]],
    ids=["nothing", "half a head", "half a body", "not http", "a broken chunk"],
)
async def test_a_server_that_breaks_off_is_a_connection_error(pieces: list[bytes]) -> None:
    async with serving(lambda _: pieces, closes=True) as (_, wire, url):
        with pytest.raises(ConnectionError):
            await ask(wire, url)


async def test_abandoning_an_answer_closes_its_connection() -> None:
    async with serving(lambda _: [CHUNKED[:60]]) as (server, wire, url):
        answer: WorkerConnection = await wire.post(url, b"", [b"{}"])
        wire.done(url, answer)
        while not server.num_ended:
            await asyncio.sleep(0.01)
        assert server.num_connections == 1


async def test_a_missing_server_raises_os_error() -> None:
    async with serving(lambda _: []) as (_, _wire, url):
        pass
    with pytest.raises(OSError):
        await ask(Wire(TRUSTS), url)


async def test_a_question_has_no_body_and_gets_the_whole_answer() -> None:
    async with serving(lambda _: [CHUNKED[:40], CHUNKED[40:]]) as (server, wire, url):
        answer = await wire.get(
            url, "/rose/v1/status?a=b", b"Authorization: Bearer k\r\nContent-Length: 0\r\n"
        )
        assert answer == (200, b"hello world")
        assert server.requests[0].startswith(b"GET /rose/v1/status?a=b HTTP/1.1\r\n")


async def test_a_question_is_sent_again_on_a_new_connection_if_the_server_has_closed_the_old_one() -> None:
    gone: list[bytes] = []  # without an answer the server closes
    replies = [[CHUNKED], gone, [CHUNKED]]
    async with serving(lambda number: replies[number - 1]) as (server, wire, url):
        assert await question(wire, url) == 200
        server.closes = True
        assert await question(wire, url) == 200
        assert (len(server.requests), server.num_connections) == (3, 2)


async def test_a_question_may_use_a_connection_that_idled_too_long_for_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire_module, "KEEPALIVE_S", 0.0)
    async with serving(lambda _: [CHUNKED]) as (server, wire, url):
        for _ in range(2):
            assert await question(wire, url) == 200
        assert server.num_connections == 1
        assert (await ask(wire, url))[0] == 200
        assert server.num_connections == 2


async def test_the_connections_to_an_address_that_is_forgotten_are_closed() -> None:
    async with serving(lambda _: [CHUNKED]) as (server, wire, url):
        assert await question(wire, url) == 200
        wire.forget(url)
        while not server.num_ended:
            await asyncio.sleep(0.01)


async def test_nothing_is_kept_of_an_address_that_is_forgotten_while_it_answers() -> None:
    async with serving(lambda _: [CHUNKED]) as (server, wire, url):
        assert await question(wire, url) == 200
        answer = await wire.post(url, b"", [b"{}"])
        wire.forget(url)
        assert await answer.text() == "hello world"
        wire.done(url, answer)
        assert not wire._idle
        while not server.num_ended:
            await asyncio.sleep(0.01)


async def question(wire: Wire, url: URL) -> int:
    status, _ = await wire.get(url, "/rose/v1/status", b"Content-Length: 0\r\n")
    return status


async def test_an_address_that_takes_no_connection_differs_from_one_that_breaks_off() -> None:
    async with serving(lambda _: [], closes=True) as (_, wire, url):
        with pytest.raises(ConnectionError) as broken:
            await wire.get(url, "/", b"Content-Length: 0\r\n")
        assert not isinstance(broken.value, NotConnected)
    with pytest.raises(NotConnected):
        await wire.get(url, "/", b"")
