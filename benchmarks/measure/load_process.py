"""What the load generators share as processes of their own: options, stop signals, progress lines.

Owns the process's signal handlers and its standard output. Promises a JSON line of progress per second, and a
last one when all is done. Never sends a request.
"""

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

PROGRESS_PERIOD_S = 1.0


class Load(Protocol):
    """A load that runs on this process's event loop."""

    def stop(self) -> None: ...

    def progress(self) -> dict[str, Any]: ...


@asynccontextmanager
async def reporting(load: Load) -> AsyncIterator[None]:
    """Prints the progress of ``load`` while the block runs it; SIGTERM and SIGINT stop it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, load.stop)
    printing = asyncio.create_task(_print_progress(load))
    try:
        yield
    finally:
        printing.cancel()
    print(json.dumps(load.progress()), flush=True)


def add_load_arguments(parser: argparse.ArgumentParser, *, url: str, out: str) -> None:
    """The options of every load; ``url`` and ``out`` say what these two mean."""
    parser.add_argument("--url", required=True, help=url)
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--out", required=True, type=Path, help=out)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--start-at", type=float, help="time.monotonic() to start at")
    parser.add_argument("--cache-salt", help="keeps this window out of other windows' prefix cache")
    parser.add_argument("--seed", type=int, default=0)


async def _print_progress(load: Load) -> None:
    while True:
        await asyncio.sleep(PROGRESS_PERIOD_S)
        print(json.dumps(load.progress()), flush=True)
