"""`rose sched dashboard`: the page, its JSON and the metrics, over HTTP.

The dashboard is a process of its own, so that nothing that a browser does holds the scheduler up. Every route
only reads.
"""

import asyncio
import base64
import hashlib
import html
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import resources

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from rose.arguments import add_insecure_flag, run_command
from rose.config import Settings
from rose.errors import ConfigError
from rose.scheduler.dashboard.access import asks_for
from rose.scheduler.dashboard.address import DEFAULT, Address
from rose.scheduler.dashboard.feed import Feed
from rose.scheduler.dashboard.metrics import prometheus_text
from rose.scheduler.dashboard.nodes import NodeFeed, add_node_flag
from rose.scheduler.runtime.command.connection import channel_parser
from rose.scheduler.runtime.job.spec import EXAMPLE

_UNCACHED = {"Cache-Control": "no-store"}


def main(argv: Sequence[str]) -> int:
    """``rose sched dashboard [--http [HOST:]PORT]``; serves until a stop signal."""
    parser = channel_parser(
        "dashboard",
        "Serves a page of a running scheduler's jobs, groups and costs, and JSON and Prometheus metrics.",
        "rose sched dashboard --http 8200 --channel redis://127.0.0.1:6379/0",
    )
    parser.add_argument(
        "--http", default=DEFAULT, metavar="[HOST:]PORT", help="address to listen on (default: %(default)s)"
    )
    add_node_flag(parser)
    add_insecure_flag(parser)
    arguments = parser.parse_args(argv)
    settings = Settings.from_environment()
    address, key = Address.parse(arguments.http), settings.dashboard_key
    nodes = [NodeFeed(url, settings.key, settings.tls_ca) for url in arguments.node]
    address.check_exposure(key, is_insecure=arguments.insecure)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(_serve(address, key, Feed(arguments.channel), nodes))
    return 0


async def _serve(address: Address, key: str | None, feed: Feed, nodes: Sequence[NodeFeed]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(build_app(feed, key, nodes), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, address.host, address.port).start()
    except OSError as error:
        await runner.cleanup()
        # A bind's own text repeats the address; a name that is not found has numbers of its own.
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ConfigError(f"--http: {address} can't be used ({why}); try another") from error
    print(f"rose sched dashboard ready http://{address}", flush=True)
    await stop.wait()
    await runner.cleanup()
    feed.close()
    for node in nodes:
        node.close()


def build_app(feed: Feed, key: str | None, nodes: Sequence[NodeFeed] = ()) -> web.Application:
    """Returns the three routes, for those who give the key."""
    folder = resources.files("rose.scheduler.dashboard")
    page, style = (folder.joinpath(f"page.{kind}").read_text() for kind in ("html", "css"))
    page = page.replace("{{example}}", html.escape(EXAMPLE)).replace("{{style}}", style)
    headers = {"Content-Security-Policy": _policy(page), **_UNCACHED}

    async def show(_: web.Request) -> web.Response:
        """Shows the dashboard's page."""
        return web.Response(text=page, content_type="text/html", headers=headers)

    async def state(_: web.Request) -> web.Response:
        """Answers all that the page shows, as JSON."""
        found, *engines = await asyncio.gather(feed.state(), *(node.state() for node in nodes))
        body = msgspec.json.encode({**found, "nodes": engines})
        return web.Response(body=body, content_type="application/json", headers=_UNCACHED)

    async def metrics(_: web.Request) -> web.Response:
        """Answers the scheduler's metrics in Prometheus' text format."""
        seen = await feed.state()
        text = prometheus_text(seen["cluster"] if seen["is_reachable"] else None)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(middlewares=[asks_for(key)])
    app.add_routes([web.get("/", show), web.get("/api/v1/state", state), web.get("/metrics", metrics)])
    return app


def _policy(page: str) -> str:
    """The page's own script and style may run, by their hashes, and nothing that a job's text brings in."""
    return "; ".join(
        [
            "default-src 'none'",
            "connect-src 'self'",
            "img-src data:",
            f"script-src {_hashes(page, 'script')}",
            f"style-src {_hashes(page, 'style')}",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _hashes(page: str, tag: str) -> str:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in found
    )


if __name__ == "__main__":
    sys.exit(run_command("sched dashboard", main, sys.argv[1:]))
