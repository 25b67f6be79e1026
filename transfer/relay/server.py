"""The process behind `rose relay`: runs a relay until it is told to stop.

Owns, for Mooncake, a master process, this process's own client, whose segment holds the objects, the folding
of snapshots, and the copying of frames from another store. Prints one JSON line {"url": ...} when the relay
is ready. SIGTERM or SIGINT stops everything that it started. Never falls back from one kind of relay to the
other.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from rose.arguments import MOST_PORT, CommandParser, add_insecure_flag, port_number, positive_int, run_command
from rose.config import Settings
from rose.errors import ConfigError, RelayError
from rose.host_memory import available_bytes
from rose.ports import check_exposure
from rose.signature import Signer, make_signing_key
from rose.tls import client_context, server_context
from rose.transfer.relay import embedded as embedded_relay
from rose.transfer.relay.folding import SnapshotFolder
from rose.transfer.relay.mooncake import MooncakeRelay, start_mooncake_master
from rose.transfer.relay.nearby_copies import NearbyCopies
from rose.transfer.relay.object_store import ObjectStore
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.url import PROTOCOLS, add_beside, rdma_cards, require_mooncake

_CHECK_MASTER_S = 0.5


def serve_mooncake(
    host: str,
    port: int,
    capacity_bytes: int,
    beside: str | None,
    protocol: str = "tcp",
    cards: Sequence[str] = (),
) -> None:
    """Runs a master and a segment until a stop signal.

    beside: the URL of a store nearby whose frames this one copies. protocol, cards: as MooncakeRelay's.
    Raises: RelayError, also when the master dies.
    """
    stop_signals = {signal.SIGTERM, signal.SIGINT}
    # The signals are blocked before Mooncake starts its threads, so that only the wait below sees them.
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    # Clients look for the metrics port beside a chosen port, so the URL survives a restart.
    master = start_mooncake_master(host, port, admin_port=port + 1 if port != 0 else 0)
    try:
        segment = MooncakeRelay(host, master.port, master.admin_port, protocol, cards, capacity_bytes)
        try:
            with ExitStack() as stack:
                url = master.url if protocol == "tcp" else f"{master.url}&protocol={protocol}"
                if beside is not None:
                    source = stack.enter_context(closing(open_relay(beside)))
                    stack.enter_context(NearbyCopies(source, segment))
                    url = add_beside(url, beside)
                stack.enter_context(SnapshotFolder(segment))
                print(json.dumps({"url": url}), flush=True)
                while signal.sigtimedwait(stop_signals, _CHECK_MASTER_S) is None:
                    if master.process.poll() is not None:
                        raise RelayError(f"mooncake_master ended with status {master.process.returncode}")
        finally:
            segment.close()
    finally:
        master.stop()


def main(argv: Sequence[str]) -> int:
    """Runs until a stop signal. Raises: ConfigError for a flag's value that can't be used; RelayError."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.make_keys:
        signing_key = make_signing_key()
        print(f"ROSE_SIGNING_KEY={signing_key}\nROSE_PUBLIC_KEY={Signer(signing_key).public_key}")
        return 0
    try:
        if args.beside is not None:
            require_mooncake(args.beside)
    except ValueError as error:
        parser.error(f"--beside: {error}")
    if args.kind == "mooncake" and args.port == MOST_PORT:
        parser.error(
            f"--port {MOST_PORT}: the Mooncake master also needs the port above it; choose a lower one"
        )
    if args.capacity_bytes > (free_bytes := available_bytes()):
        parser.error(f"--capacity-bytes {args.capacity_bytes}: {free_bytes} bytes of memory are free here")
    if (args.tls_certificate is None) != (args.tls_key is None):
        parser.error("--tls-certificate and --tls-key go together: give both")
    if args.kind == "mooncake" and (args.tls_certificate is not None or args.tls_ca is not None):
        parser.error("--tls-certificate and --tls-ca are for --kind embedded: a Mooncake store has no TLS")
    if args.beside is not None and args.kind != "mooncake":
        parser.error("--beside is for --kind mooncake: embedded relays hand objects on themselves")
    if args.kind != "mooncake" and (args.protocol != "tcp" or args.devices):
        parser.error("--protocol and --devices are for --kind mooncake: embedded relays speak HTTP")
    if args.devices and args.protocol != "rdma":
        parser.error(f"--devices {','.join(args.devices)}: needs --protocol rdma")
    cards = rdma_cards(args.devices) if args.protocol == "rdma" else ()
    settings = Settings.from_environment()
    protects = {"ROSE_KEY": settings.key} if args.kind == "embedded" else {}
    check_exposure("--host", args.host, protects, is_insecure=args.insecure)
    try:
        if args.kind == "mooncake":
            serve_mooncake(args.host, args.port, args.capacity_bytes, args.beside, args.protocol, cards)
        else:
            _serve_embedded(args, settings)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--port {args.port} on {args.host}: {reason}; choose another port") from error
    return 0


def _serve_embedded(args: argparse.Namespace, settings: Settings) -> None:
    trusts = client_context(args.tls_ca) if args.tls_ca is not None else None
    app = embedded_relay.make_app(ObjectStore(args.capacity_bytes), settings.key, settings.read_key, trusts)
    shows = server_context(args.tls_certificate, args.tls_key) if args.tls_certificate is not None else None
    asyncio.run(embedded_relay.serve(args.host, args.port, app, shows))


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose relay",
        "Carries weights from a trainer to the engines that follow it. Prints its URL when ready.",
        "rose relay --kind embedded --port 8400",
    )
    parser.add_argument(
        "--kind",
        choices=("embedded", "mooncake"),
        default="embedded",
        help="the store of the weights (default %(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument(
        "--port", type=port_number, default=0, help="port to listen on (default: any free one)"
    )
    add_insecure_flag(parser)
    parser.add_argument(
        "--beside",
        metavar="URL",
        help="a Mooncake store whose frames this relay copies, so that the trainer sends them only once",
    )
    parser.add_argument(
        "--protocol",
        choices=PROTOCOLS,
        default=PROTOCOLS[0],
        help="how a Mooncake store's frames travel (default %(default)s)",
    )
    parser.add_argument(
        "--devices",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="CARD,...",
        help="RDMA cards of this host for --protocol rdma (default: all)",
    )
    parser.add_argument(
        "--tls-certificate", type=Path, metavar="FILE", help="serve TLS with this certificate, in PEM"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's key, in PEM")
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="certificates to trust where objects are handed on to other relays (default: the system's)",
    )
    parser.add_argument(
        "--make-keys",
        action="store_true",
        help="print a new key for a trainer that signs its weights, and the public one for followers",
    )
    parser.add_argument(
        "--capacity-bytes",
        type=positive_int,
        default=min(embedded_relay.DEFAULT_CAPACITY_BYTES, available_bytes() // 2),
        help="memory for objects (default: 8 GiB, or half of the free memory if that is less)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_command("relay", main, sys.argv[1:]))
