"""The subscriber: one process beside a host's rollout engines that keeps their weights up to date.

`python -m rose.transfer.follow.subscriber --relay URL --run RUN|auto --worker http://host:port --staging DIR
 [--worker URL ...] [--base CHECKPOINT_DIR] [--name NAME]`

Owns the mirror, of which a host has one for all engines that it names (shared_mirror.py), and the workers'
acknowledgements in the relay. Fetching, decoding and checking happen outside the engines, which write what
changed. Each worker is served by a thread of its own (delivery.py), so that one that hangs holds up no other.
After any failure a worker keeps its old version, and it is tried again with growing pauses.
"""

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType
from typing import Protocol
from urllib.parse import urlsplit

from rose.arguments import CommandParser
from rose.config import Settings
from rose.errors import RelayError, RoseError
from rose.messages import WeightUpdate
from rose.transfer.follow.delivery import FIRST_RETRY_S, STATUS_EVERY_S, Delivery, WorkerClient, next_pause
from rose.transfer.follow.follower import AUTO_RUN, Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.follow.shared_mirror import SharedMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.leases import ACK_EVERY_S
from rose.transfer.format.manifest import Ack, pack_body
from rose.transfer.format.shard_plan import read_plan
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Store(Protocol):
    """Where the weights lie for the workers."""

    def update_from(self, base: str | None) -> WeightUpdate | None:
        """Returns what brings a worker from version `base` to the newest; None while there is none."""

    def forget(self, in_use: Collection[str]) -> None:
        """Removes what no worker needs. in_use: the versions that workers run or are taking."""


class Subscriber:
    """Follows the relay in the calling thread, and has the workers' threads deliver.

    workers: by the names under which they acknowledge.
    """

    def __init__(
        self, relay: Relay, follower: Follower, store: Store, workers: Sequence[tuple[str, WorkerClient]]
    ) -> None:
        self._relay = relay
        self._follower = follower
        self._store = store
        self._ended = threading.Condition()
        self._deliveries = [Delivery(name, worker, self._ended) for name, worker in workers]
        self._acknowledged: dict[str, tuple[str, float]] = {}
        self._num_acks = 0
        self._retry_at_s = 0.0
        self._retry_s = FIRST_RETRY_S

    def step(self, now_s: float) -> None:
        """Looks once. A failure is logged and delays the next look."""
        try:
            is_read = any(delivery.reads_mirror(now_s) for delivery in self._deliveries)
            if now_s >= self._retry_at_s:
                self._follower.advance(may_move=not is_read)
                self._retry_s = FIRST_RETRY_S
            for delivery in self._deliveries:
                self._deliver(delivery, now_s)
            self._store.forget(set().union(*(delivery.versions for delivery in self._deliveries)))
            self._acknowledge(now_s)
        except (RoseError, OSError) as error:
            logger.warning("weights not fetched, next try in %.1f s: %s", self._retry_s, error)
            self._retry_at_s = now_s + self._retry_s
            self._retry_s = next_pause(self._retry_s)

    def wait(self, now_s: float) -> None:
        """Returns when step() may have something to do."""
        retries = [each.retry_at_s - now_s for each in self._deliveries if each.retry_at_s > now_s]
        with self._ended:
            if any(delivery.is_busy for delivery in self._deliveries):
                self._ended.wait(STATUS_EVERY_S)  # the end of a delivery is acknowledged at once
                return
        if now_s < self._retry_at_s:
            time.sleep(self._retry_at_s - now_s)
            return
        try:
            self._follower.wait(min([STATUS_EVERY_S, *retries]))
        except RelayError as error:
            logger.warning("can't wait for weights, next look in %.1f s: %s", FIRST_RETRY_S, error)
            time.sleep(FIRST_RETRY_S)

    def _deliver(self, delivery: Delivery, now_s: float) -> None:
        update = self._store.update_from(delivery.version)
        if update is not None and not delivery.is_busy:
            delivery.begin(update, now_s)

    def _acknowledge(self, now_s: float) -> None:
        """Says which versions the workers run, and again now and then, or the trainer takes them for gone."""
        for delivery in self._deliveries:
            update = delivery.delivered
            said, renew_at_s = self._acknowledged.get(delivery.name, (None, 0.0))
            if update is None or (said == update.version and now_s < renew_at_s):
                continue
            self._num_acks += 1
            run_id, _, number = update.version.rpartition("/")
            ack = Ack(
                worker=delivery.name,
                version=int(number),
                state_hash=update.state_hash,
                beat=self._num_acks,
            )
            self._relay.upsert(keys.ack_prefix(run_id) + delivery.name, pack_body(ack))
            self._acknowledged[delivery.name] = (update.version, now_s + ACK_EVERY_S)


def follow(args: argparse.Namespace, settings: Settings) -> None:
    """Follows until the process is told to stop.

    Raises: RelayError when the relay does not answer at the start, ConfigError on a bad public key,
    ValueError on bad input.
    """
    names = worker_names(args.name, args.worker)
    plans = [read_plan(path) for path in args.plan]
    with closing(open_relay(args.relay, settings.follower_key)) as relay, ExitStack() as open_now:
        store = open_now.enter_context(closing(SharedMirror(args.staging)))
        workers = [
            open_now.enter_context(closing(WorkerClient(url, settings.key, ca=settings.tls_ca)))
            for url in args.worker
        ]
        mirror = WeightMirror(plans, store)
        follower = Follower(relay, args.run, mirror, args.base, settings.public_key)
        subscriber = Subscriber(relay, follower, store, list(zip(names, workers, strict=True)))
        while True:
            subscriber.step(time.monotonic())
            subscriber.wait(time.monotonic())


def worker_names(name: str | None, urls: Sequence[str]) -> list[str]:
    """Returns the names under which the workers acknowledge. Raises: ValueError."""
    if name is not None and len(urls) > 1:
        raise ValueError(f"--name {name} can't stand for {len(urls)} workers; leave it away")
    names = (
        [keys.worker_name(url) for url in urls] if name is None else [keys.check_name(name, "worker name")]
    )
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice:
        raise ValueError(f"--worker names {twice[0]} twice")
    return names


def stop(number: int, frame: FrameType | None) -> None:
    """Exits even from a call that a hung worker never answers; the clean-up on the way out runs once."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(0)


def worker_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form http://HOST:PORT")
    return text


def _existing_path(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return path


def _parser() -> CommandParser:
    program = "python -m rose.transfer.follow.subscriber"
    parser = CommandParser(
        program,
        "Keeps the weights of a host's rollout engines up to date: follows a run in the relay, and delivers "
        "its versions.",
        f"{program} --relay embedded://relay:8400 --worker http://127.0.0.1:8001 --staging /dev/shm/rose",
    )
    parser.add_argument(
        "--relay",
        required=True,
        help="embedded://HOST:PORT, embedded+tls://HOST:PORT?ca=FILE or mooncake://HOST:PORT",
    )
    parser.add_argument(
        "--run", default=AUTO_RUN, help="run id, or auto: the only live run (default %(default)s)"
    )
    parser.add_argument(
        "--worker",
        type=worker_url,
        action="append",
        required=True,
        help="http://HOST:PORT of an engine's server on this host; once for each engine",
    )
    parser.add_argument(
        "--staging", type=Path, required=True, help="folder for the weights, preferably under /dev/shm"
    )
    parser.add_argument(
        "--base",
        type=_existing_path,
        help="checkpoint that the trainer starts from: the first snapshot then need not be fetched",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="plans that `rose plan` wrote for this host's ranks: only their shards are fetched",
    )
    parser.add_argument(
        "--name", help="name under which a single worker acknowledges versions (default: its host and port)"
    )
    return parser


def main() -> None:
    """Runs the command; bad input is one line on stderr and exit status 2."""
    run_subscriber(_parser(), follow)


def run_subscriber(
    parser: argparse.ArgumentParser, follow: Callable[[argparse.Namespace, Settings], None]
) -> None:
    """Runs a subscriber with the command line's arguments, among them --staging, until a signal stops it."""
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    try:
        args.staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--staging {args.staging}: {error.strerror}")
    try:
        follow(args, Settings.from_environment())
    except (RoseError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
