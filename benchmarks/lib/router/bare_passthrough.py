"""Passes requests on with aiohttp on both sides and does nothing else: the floor of the router's figures.

Owns: reading a body, sending it to the worker, sending its answer back as it comes. Never: looks into
either, streams from the worker where the client did not ask, or knows of more than one worker.

    python benchmarks/lib/router/bare_passthrough.py --worker URL --port PORT
"""

import argparse
import asyncio
import gc
import sys
from collections.abc import AsyncIterator

import aiohttp
import uvloop
from aiohttp import web

_READ_BYTES = 2**20
"""The router's own limit: a long body does not stop the connection."""


def make_app(worker: str) -> web.Application:
    """Returns an app that passes every POST to the worker's same path."""
    session: aiohttp.ClientSession

    async def health(_request: web.Request) -> web.Response:
        return web.Response()

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        url, headers = worker + request.path, {"Content-Type": "application/json"}
        async with session.post(url, data=body, headers=headers) as upstream:
            answer = web.StreamResponse(headers={"Content-Type": upstream.headers["Content-Type"]})
            await answer.prepare(request)
            async for data in upstream.content.iter_any():
                await answer.write(data)
            await answer.write_eof()
            return answer

    async def client(_app: web.Application) -> AsyncIterator[None]:
        nonlocal session
        connector, jar = aiohttp.TCPConnector(limit=0), aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(
            connector=connector, cookie_jar=jar, read_bufsize=_READ_BYTES
        ) as session:
            yield

    app = web.Application(client_max_size=2**28)
    app.cleanup_ctx.append(client)
    app.router.add_get("/health", health)
    app.router.add_post("/{path:.*}", forward)
    return app


async def serve(worker: str, port: int) -> None:
    """Serve until killed."""
    runner = web.AppRunner(make_app(worker), access_log=None, read_bufsize=_READ_BYTES)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    gc.collect()
    gc.freeze()
    await asyncio.Event().wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(args.worker, args.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
