"""The process behind `rose relay`: runs a relay until it is told to stop.

Owns: for Mooncake, a master process and this process's own client, whose segment holds the objects, and the
copies from another store beside it.
Promises: prints one JSON line {"url": ...} when ready; SIGTERM or SIGINT stops everything it started.
Never falls back from one kind to the other.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing

from rose.arguments import CommandParser, run_command
from rose.config import Settings
from rose.errors import ConfigError, RelayError
from rose.transfer.relay import embedded as embedded_relay
from rose.transfer.relay.mooncake import MooncakeRelay, start_mooncake_master
from rose.transfer.relay.nearby_copies import NearbyCopies
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.url import add_beside, require_mooncake

_CHECK_MASTER_S = 0.5


def serve_mooncake(host: str, port: int, capacity_bytes: int, beside: str | None) -> None:
    """Runs a master and a segment until a stop signal.

    beside: URL of a store nearby whose frames this one copies. Raises: RelayError, also when the master dies.
    """
    stop_signals = {signal.SIGTERM, signal.SIGINT}
    # Blocked before Mooncake starts its threads, so that only the wait below sees them.
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    # Beside a chosen port, where clients look for it: the URL then survives a restart.
    master = start_mooncake_master(host, port, admin_port=port + 1 if port != 0 else 0)
    try:
        segment = MooncakeRelay(host, master.port, master.admin_port, segment_bytes=capacity_bytes)
        try:
            with ExitStack() as stack:
                url = master.url
                if beside is not None:
                    source = stack.enter_context(closing(open_relay(beside)))
                    stack.enter_context(NearbyCopies(source, segment))
                    url = add_beside(url, beside)
                print(json.dumps({"url": url}), flush=True)
                while signal.sigtimedwait(stop_signals, _CHECK_MASTER_S) is None:
                    if master.process.poll() is not None:
                        raise RelayError(f"mooncake_master ended with status {master.process.returncode}")
        finally:
            segment.close()
    finally:
        master.stop()


def main(argv: Sequence[str]) -> int:
    """Runs until a stop signal. Raises: ConfigError for a port in use, RelayError."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if args.beside is not None:
            require_mooncake(args.beside)
    except ValueError as error:
        parser.error(f"--beside: {error}")
    if args.beside is not None and args.kind != "mooncake":
        parser.error("--beside is for --kind mooncake: embedded relays hand objects on themselves")
    try:
        if args.kind == "mooncake":
            serve_mooncake(args.host, args.port, args.capacity_bytes, args.beside)
        else:
            key = Settings.from_environment().key
            asyncio.run(embedded_relay.serve(args.host, args.port, args.capacity_bytes, key))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--port {args.port} on {args.host}: {reason}; choose another port") from error
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose relay",
        "Carries weights from a trainer to the engines that follow it. Prints its URL when ready.",
        "rose relay --kind embedded --port 8400",
    )
    parser.add_argument(
        "--kind", choices=("embedded", "mooncake"), default="embedded", help="default %(default)s"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="default: any free port")
    parser.add_argument(
        "--beside",
        metavar="URL",
        help="a Mooncake store nearby: this one copies its frames, and the trainer sends them once",
    )
    parser.add_argument(
        "--capacity-bytes",
        type=int,
        default=embedded_relay.DEFAULT_CAPACITY_BYTES,
        help="memory for objects (default %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_command("relay", main, sys.argv[1:]))
