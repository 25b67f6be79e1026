"""TLS handshakes that fail, that never finish, or for which there is no room."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose.ports import free_port
from rose.scheduler.rollout.http.handshakes import Handshakes
from rose.tls import client_context, server_context
from tests.certificates import make_certificate
from tests.scheduler.rollout.conftest import router_process
from tests.scheduler.rollout.waiting import until

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TlsRouter:
    """A router that serves HTTPS, and how clients reach it."""

    def __init__(self, port: int, certificate: Path) -> None:
        self.port = port
        self._trusts = client_context(certificate)

    async def connect(self, *, origin: str = "127.0.0.1") -> Connection:
        """Opens a connection that begins no handshake."""
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(origin, 0))

    async def scrape(self, *, origin: str = "127.0.0.1") -> tuple[int, str]:
        connector = aiohttp.TCPConnector(ssl=self._trusts, local_addr=(origin, 0))
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.get(f"https://127.0.0.1:{self.port}/metrics") as response,
        ):
            return response.status, await response.text()

    async def handshakes(self) -> dict[str, int]:
        """The number of handshakes by result, that of this very question included."""
        _, text = await self.scrape(origin="127.0.0.9")
        name = 'rose_router_tls_handshakes_total{result="'
        lines = [line.removeprefix(name) for line in text.splitlines() if line.startswith(name)]
        return {line.partition('"')[0]: int(float(line.split()[-1])) for line in lines}


@asynccontextmanager
async def tls_router(folder: Path, **settings: Any) -> AsyncIterator[TlsRouter]:
    certificate, key = make_certificate(folder)
    file, port = folder / "router.yaml", free_port()
    shown = {"tls_certificate": str(certificate), "tls_key": str(key)}
    file.write_text(json.dumps({**shown, "state": None, **settings}))
    async with router_process(port, str(file)):
        yield TlsRouter(port, certificate)


async def test_connections_whose_tls_handshake_fails_make_room_at_once(tmp_path: Path) -> None:
    async with tls_router(tmp_path, max_connections=2) as router:
        for _ in range(2):
            reader, writer = await router.connect()
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await reader.read() == b"", "the router has closed it"
            writer.close()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            async with aiohttp.ClientSession() as http:
                await http.get(f"https://127.0.0.1:{router.port}/metrics", ssl=client_context(None))
        for _ in range(2):
            assert (await router.scrape())[0] == 200
        counts = await router.handshakes()
        assert counts["failed"] >= 2
        assert counts["finished"] >= 3


async def test_an_address_with_unfinished_handshakes_gets_no_more_and_keeps_out_no_other(
    tmp_path: Path,
) -> None:
    async with tls_router(tmp_path, max_handshakes=2) as router:
        silent = [await router.connect() for _ in range(2)]
        for _ in range(3):
            reader, writer = await router.connect()
            assert await reader.read() == b"", "the router has closed it without a handshake"
            writer.close()
        assert (await router.scrape(origin="127.0.0.2"))[0] == 200
        assert (await router.handshakes())["refused"] == 3
        silent[0][1].close()
        await until_room(router)
        silent[1][1].close()


async def until_room(router: TlsRouter) -> None:
    """Waits until the router has seen that a connection ended."""
    while True:
        try:
            assert (await router.scrape())[0] == 200
            return
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.02)


async def test_a_connection_for_which_there_is_no_room_costs_no_handshake(tmp_path: Path) -> None:
    async with tls_router(tmp_path, max_connections=1) as router:
        silent = [await router.connect(origin=f"127.0.1.{number + 1}") for number in range(33)]
        reader, writer = await router.connect()
        assert await reader.read() == b"", "the router has closed it"
        assert not any(held.at_eof() for held, _ in silent), "it has not waited for a handshake to end"
        writer.close()
        for _, held_writer in silent:
            held_writer.close()
        await until_room(router)
        assert (await router.handshakes())["refused"] >= 1


@pytest.mark.slow
async def test_connections_that_begin_no_tls_handshake_count_and_are_closed(tmp_path: Path) -> None:
    async with tls_router(tmp_path, max_connections=2, idle_s=5) as router:
        silent = [await router.connect() for _ in range(2)]
        statuses = []
        while 200 not in statuses:
            statuses.append((await router.scrape())[0])
        assert statuses[0] == 503
        for reader, writer in silent:
            assert await reader.read() == b"", "the router has closed it"
            writer.close()
        assert (await router.handshakes())["late"] == 2


async def test_a_connection_that_makes_the_router_fail_keeps_out_no_later_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def has_room() -> bool:
        asked.append(len(asked))
        if len(asked) == 1:
            raise RuntimeError("scripted")
        return True

    certificate, key = make_certificate(tmp_path)
    counts: Counter[str] = Counter()
    handshakes = Handshakes(
        server_context(certificate, key), asyncio.Protocol, has_room, counts, most=4, limit_s=60
    )
    _, port = await handshakes.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b"", "it is closed"
    writer.close()
    _, silent = await asyncio.open_connection("127.0.0.1", port)
    await until(lambda: len(handshakes) == 1)
    _, secured = await asyncio.open_connection("127.0.0.1", port, ssl=client_context(certificate))
    await until(lambda: counts["finished"] == 1)  # by the client's word it has, a moment earlier
    assert len(handshakes) == 1
    for each in (silent, secured):
        each.close()
    await handshakes.close()
    assert [record.levelname for record in caplog.records if "connection closed" in record.message] == [
        "ERROR"
    ]
