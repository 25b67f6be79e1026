"""The scheduler's process: it reads calls, decides, commits and answers.

A decision is durable before its call is answered, and before a router is told of a loan. Killed at any point
and started again on the same channel, the process continues where it was. Never: starts a job; that is the
runner's (rose.jobs.runner).
"""

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from rose.arguments import CommandParser, run_command
from rose.config import Settings, load_yaml
from rose.errors import ChannelError
from rose.scheduler.runtime.channel.messages import Answer, History, decode_call, encode
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.channel.protocol import Incoming, Outgoing, SchedulerSide
from rose.scheduler.runtime.decide.cluster_scheduler import ClusterScheduler
from rose.scheduler.runtime.job.spec import ServeSpec
from rose.scheduler.runtime.lending.fleet_router import FleetRouter

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""The longest time until an expired lease is noticed."""
MIN_WAIT_S = 0.001
"""A job that is held back is so for a time that may grow as the one behind takes longer."""


def main(argv: Sequence[str]) -> int:
    """``service --channel URL [--cluster PATH]``; runs until it is killed."""
    parser = CommandParser(
        "python -m rose.scheduler.runtime.command.scheduler_process",
        "The cluster scheduler alone, without a runner for its jobs; rose sched serve starts both.",
        "python -m rose.scheduler.runtime.command.scheduler_process --channel redis://127.0.0.1:6379/0",
    )
    parser.add_argument(
        "--channel",
        default=Settings.from_environment().channel_url,
        help="where the scheduler listens: unix:FOLDER or redis://HOST:PORT/DB (default: %(default)s)",
    )
    parser.add_argument(
        "--cluster", type=Path, help="pools, prices, groups and limits (default: as for rose sched serve)"
    )
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    cluster = load_yaml(arguments.cluster, ServeSpec) if arguments.cluster is not None else ServeSpec()
    channel = ChannelUrl.parse(arguments.channel).serve()
    # What time.monotonic() counts from is the same for all processes until the next boot.
    clock = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    router = FleetRouter.of(cluster.router, Settings.from_environment())
    control = ClusterScheduler(cluster, channel.load(), time.monotonic(), os.getpid(), clock)
    serve(channel, control, router)


def serve(channel: SchedulerSide, control: ClusterScheduler, router: FleetRouter | None) -> NoReturn:
    """Handles calls until the process ends, or another scheduler takes over (ChannelError)."""
    logger.info("scheduling")
    while True:
        arrived = channel.receive(_wait_s(control, time.monotonic()))
        now = time.monotonic()
        asked = [call for incoming in arrived if (call := _handle(control, incoming, now)) is not None]
        if router is not None:
            control.router_heard(router.news())
        control.tick(now)
        batch = control.take_batch()
        batch.outgoing += [_history(channel, client, call) for client, call in asked]
        channel.commit(batch, arrived)
        if router is not None:
            router.want(control.loans)  # committed, so the next scheduler knows what this one has told


def _wait_s(control: ClusterScheduler, now: float) -> float:
    wake_s = control.next_wake_s(now)
    return POLL_S if wake_s is None else max(MIN_WAIT_S, min(POLL_S, wake_s - now))


def _handle(control: ClusterScheduler, incoming: Incoming, now: float) -> tuple[str, History] | None:
    """Decides the call. Returns a call that only reads what the channel keeps."""
    try:
        call = decode_call(incoming.body)
    except ChannelError:
        # One client's nonsense ends nobody's job; it can't be answered, for its number is unknown.
        logger.exception("dropped client=%s", incoming.client)
        return None
    if isinstance(call, History):
        return incoming.client, call
    began_s = time.perf_counter()
    control.handle(incoming.client, call, now)
    control.decided(call, time.perf_counter() - began_s)
    return None


def _history(channel: SchedulerSide, client: str, call: History) -> Outgoing:
    try:
        events = [msgspec.json.decode(event) for event in channel.events(call.last)]
    except ChannelError as error:
        return Outgoing(client=client, body=encode(Answer(seq=call.seq, error=str(error))))
    return Outgoing(client=client, body=encode(Answer(seq=call.seq, body={"events": events})))


if __name__ == "__main__":
    sys.exit(run_command("sched serve", main, sys.argv[1:]))
