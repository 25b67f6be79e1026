"""The adapters' subscriber: one process beside a host's engines that follows runs with LoRA adapters.

`python -m rose.transfer.adapters.subscriber --relay URL --adapter RUN [--adapter RUN ...]
 --worker http://host:port [--worker URL ...] --staging DIR`

Owns one thread, one connection to the relay and one folder for each run, so that a run whose trainer is slow
or whose versions are refused holds up no other. Each follows, delivers and acknowledges as the subscriber of
whole weights does (rose.transfer.follow.subscriber).
"""

import argparse
import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from rose.arguments import CommandParser
from rose.config import Settings
from rose.http import url_argument
from rose.transfer.adapters.folders import AdapterFolders
from rose.transfer.follow.delivery import WorkerClient
from rose.transfer.follow.follower import AUTO_RUN, Follower
from rose.transfer.follow.following import Subscriber
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.follow.subscriber import run_subscriber, worker_names
from rose.transfer.format import manifest as keys
from rose.transfer.format.manifest import AdapterBody
from rose.transfer.relay.opening import open_relay


class AdapterFollowing:
    """One run, from the relay to the workers. Raises: RelayError, ConfigError, ValueError, OSError."""

    def __init__(self, run_id: str, relay_url: str, urls: Sequence[str], staging: Path, settings: Settings):
        with ExitStack() as opened:
            relay = opened.enter_context(closing(open_relay(relay_url, settings.follower_key)))
            store = opened.enter_context(closing(AdapterFolders(staging / run_id, self._description)))
            workers = [
                opened.enter_context(closing(WorkerClient(url, settings.key, run_id, settings.tls_ca)))
                for url in urls
            ]
            self._follower = Follower(
                relay,
                run_id,
                WeightMirror(store=store),
                public_key=settings.public_key,
                takes_adapter=True,
            )
            named = list(zip(worker_names(None, urls), workers, strict=True))
            self._subscriber = Subscriber(relay, self._follower, store, named)
            self._opened = opened.pop_all()

    def _description(self) -> AdapterBody | None:
        return self._follower.adapter

    def step(self) -> None:
        """Looks once, and waits until there may be something new."""
        self._subscriber.step(time.monotonic())
        self._subscriber.wait(time.monotonic())

    def close(self) -> None:
        self._opened.close()


def follow(args: argparse.Namespace, settings: Settings) -> None:
    """Follows all runs until the process is told to stop. Raises: as AdapterFollowing does."""
    runs = list(dict.fromkeys(args.adapter))
    failed: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    with ExitStack() as open_now:
        followings = [
            open_now.enter_context(
                closing(AdapterFollowing(run_id, args.relay, args.worker, args.staging, settings))
            )
            for run_id in runs
        ]
        for run_id, following in zip(runs, followings, strict=True):
            # A daemon: a relay that hangs does not keep the process from stopping.
            threading.Thread(target=_run, args=(following, failed), name=run_id, daemon=True).start()
        raise failed.get()


def _run(following: AdapterFollowing, failed: "queue.SimpleQueue[BaseException]") -> None:
    try:
        while True:
            following.step()
    except BaseException as error:  # the process ends with it: no run may be left out silently
        logging.getLogger(__name__).exception("following an adapter failed")
        failed.put(error)


def _run_id(text: str) -> str:
    if text == AUTO_RUN:
        raise argparse.ArgumentTypeError(f"{text}: an adapter's run has to be named")
    try:
        return keys.check_name(text, "run id")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> CommandParser:
    program = "python -m rose.transfer.adapters.subscriber"
    parser = CommandParser(
        program,
        "Keeps the LoRA adapters of a host's engines up to date: follows their runs in the relay, and "
        "delivers each version.",
        f"{program} --relay embedded://relay:8400 --adapter math --worker http://127.0.0.1:8001 "
        "--staging /dev/shm/rose-adapters",
    )
    parser.add_argument(
        "--relay",
        required=True,
        help="embedded://HOST:PORT, embedded+tls://HOST:PORT?ca=FILE or mooncake://HOST:PORT",
    )
    parser.add_argument(
        "--adapter",
        type=_run_id,
        action="append",
        required=True,
        metavar="RUN",
        help="run id of an adapter; may be repeated",
    )
    parser.add_argument(
        "--worker",
        type=url_argument,
        action="append",
        required=True,
        help="http://HOST:PORT of an engine's server on this host; may be repeated",
    )
    parser.add_argument(
        "--staging", type=Path, required=True, help="folder for the adapters, preferably under /dev/shm"
    )
    return parser


def main() -> None:
    """Runs the command; bad input is one line on stderr and exit status 2."""
    run_subscriber(_parser(), follow)


if __name__ == "__main__":
    main()
