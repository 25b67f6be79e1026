"""The subscriber: one process beside a host's rollout engines that keeps their weights up to date.

`python -m rose.transfer.follow.subscriber --relay URL --run RUN|auto --worker http://host:port --staging DIR
 [--worker URL ...] [--base CHECKPOINT_DIR] [--name NAME]`

Owns the mirror of the run, one for all engines that the command names (shared_mirror.py), and one more for
each run that loans of the engines' GPUs name (loans.py).
"""

import argparse
import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType

from rose.arguments import CommandParser
from rose.config import Settings
from rose.errors import RoseError
from rose.http import url_argument
from rose.transfer.follow.delivery import WorkerClient
from rose.transfer.follow.follower import AUTO_RUN, Follower
from rose.transfer.follow.following import Subscriber
from rose.transfer.follow.loans import FollowedLoans, LentRun
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.follow.shared_mirror import SharedMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.architecture import Architecture
from rose.transfer.format.manifest import LayoutBody
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LENT_DIR = "lent"
"""The folder of the mirrors of lent runs, inside that of the weights."""


def follow(args: argparse.Namespace, settings: Settings) -> None:
    """Follows until the process is told to stop.

    Raises: RelayError when the relay does not answer at the start, ConfigError on a bad public key,
    ValueError on bad input.
    """
    names = worker_names(args.name, args.worker)

    def link() -> Relay:
        return open_relay(args.relay, settings.follower_key)

    with closing(link()) as relay, ExitStack() as open_now:
        store = open_now.enter_context(closing(SharedMirror(args.staging)))
        lent_dir = args.staging / LENT_DIR
        shutil.rmtree(lent_dir, ignore_errors=True)  # of a process that was killed
        open_now.callback(shutil.rmtree, lent_dir, ignore_errors=True)
        workers = {
            name: open_now.enter_context(closing(WorkerClient(url, settings.key, ca=settings.tls_ca)))
            for name, url in zip(names, args.worker, strict=True)
        }
        mirror = WeightMirror(store=store)
        follower = Follower(relay, args.run, mirror, args.base, settings.public_key)
        home = Subscriber(relay, follower, store, list(workers.items()))

        def open_run(run_id: str, accept: Callable[[LentRun, LayoutBody], None]) -> LentRun:
            folder, key = lent_dir / run_id, settings.public_key
            return LentRun(run_id, folder, link, workers, args.base, key, accept)

        def architecture() -> Architecture | None:
            layout = mirror.planes.layout if mirror.planes is not None else None
            return Architecture.known(layout, args.base)

        open_now.enter_context(closing(FollowedLoans(home, workers, open_run, architecture)))
        while True:
            home.step(time.monotonic())
            home.wait(time.monotonic())


def worker_names(name: str | None, urls: Sequence[str]) -> list[str]:
    """Returns the names under which the workers acknowledge. Raises: ValueError."""
    if name is not None and len(urls) > 1:
        raise ValueError(f"--name {name} can't stand for {len(urls)} workers; leave it out")
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
        type=url_argument,
        action="append",
        required=True,
        help="http://HOST:PORT of an engine's server on this host; may be repeated",
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
