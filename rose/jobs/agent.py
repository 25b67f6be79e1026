"""`rose sched agent`: offers this host's nodes to a scheduler on another host, and runs jobs on them.

Owns this host's runner. Jobs start and end as the scheduler orders, each in a process group of its own. The
process sends heartbeats while it lives, and when it ends, its jobs end too.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rose.arguments import CommandParser, count, run_command
from rose.config import Settings, make_private_dir
from rose.errors import ConfigError
from rose.jobs.runner import Offer, Runner
from rose.jobs.serve import START_S, cache_root
from rose.node.signals import StopOnSignals
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.command.connection import channel_parser


def main(argv: Sequence[str]) -> int:
    """``rose sched agent --channel redis://HOST:PORT/0 --rollout-nodes N --train-nodes M``."""
    settings = Settings.from_environment()
    arguments = _parser(settings).parse_args(argv)
    offer = Offer(
        host=arguments.host,
        num_nodes={Phase.ROLLOUT: arguments.rollout_nodes, Phase.TRAIN: arguments.train_nodes},
    )
    if min(offer.num_nodes.values()) < 0 or not any(offer.num_nodes.values()):
        raise ConfigError(
            f"--rollout-nodes {arguments.rollout_nodes} --train-nodes {arguments.train_nodes}: "
            "an agent needs at least one node to offer"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    folder = make_private_dir(arguments.folder, "choose another with --folder")
    channel = ChannelUrl.parse(arguments.channel).join(f"agent:{arguments.host}")
    cache = cache_root(settings, arguments.channel, arguments.host)
    with StopOnSignals(), ControlClient(channel, START_S) as client:
        runner = Runner(client, arguments.channel, folder, cache, offer=offer)
        try:
            runner.run(lambda: None)
        finally:
            runner.close()
    return 0


def _parser(settings: Settings) -> CommandParser:
    parser = channel_parser(
        "agent",
        "Runs jobs of a scheduler (rose sched serve --agents) on this host's nodes.",
        "rose sched agent --channel redis://head:6379/0 --rollout-nodes 4",
    )
    parser.add_argument(
        "--host", default=os.uname().nodename, help="a name that no other agent has (default: %(default)s)"
    )
    for pool in ("rollout", "train"):
        parser.add_argument(
            f"--{pool}-nodes",
            type=count,
            default=0,
            metavar="N",
            help=f"the {pool} nodes that groups may use on this host (default: %(default)s)",
        )
    parser.add_argument(
        "--folder",
        type=Path,
        default=settings.runtime_dir / "jobs",
        help="where job files and logs go (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_command("sched agent", main, sys.argv[1:]))
