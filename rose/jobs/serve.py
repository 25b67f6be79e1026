"""`rose sched serve`: the cluster scheduler and the runner of its jobs, on one machine or on a Ray cluster.

Owns the scheduler's process, the dashboard's process if asked for, and the runner. A scheduler that dies is
started again, and its jobs only wait a little. When this process ends, so do all of these and the jobs on
this machine; jobs on a Ray cluster go on. The scheduler answers from the start, while the runner still waits
for Ray.
"""

import argparse
import logging
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from rose.arguments import CommandParser, add_insecure_flag, run_command
from rose.config import Settings, load_yaml, make_private_dir
from rose.errors import ChannelError, ConfigError, WorkerError, install_hint
from rose.jobs.dashboard import DashboardProcess
from rose.jobs.runner import Engine, HostEngine, Runner
from rose.node.processes import ServerProcess
from rose.node.signals import StopOnSignals
from rose.scheduler.dashboard.nodes import add_node_flag
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.messages import Answer, Status
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.channel.protocol import ClientSide
from rose.scheduler.runtime.command.connection import channel_parser
from rose.scheduler.runtime.job.spec import ServeSpec
from rose.scheduler.runtime.lending.fleet_router import admin_key

logger = logging.getLogger(__name__)

START_S = 120.0
POLL_S = 0.1


class ScheduledNode:
    """The supervised scheduler. ``check`` starts it again when a signal has ended it."""

    def __init__(self, channel: str, cluster: Path | None, log_path: Path | None = None) -> None:
        """Checks both, and starts nothing. log_path: the scheduler's log; None: this terminal."""
        ChannelUrl.parse(channel)
        self._argv = [
            sys.executable,
            "-m",
            "rose.scheduler.runtime.command.scheduler_process",
            "--channel",
            channel,
        ]
        if cluster is not None:
            load_yaml(cluster, ServeSpec)
            self._argv += ["--cluster", str(cluster)]
        self._log_path = log_path
        self._scheduler = self._new()

    def _new(self) -> ServerProcess:
        return ServerProcess(self._argv, "scheduler", self._log_path)

    def start(self) -> None:
        """Runs the scheduler."""
        self._scheduler.start()

    @property
    def scheduler_pid(self) -> int:
        """Returns the pid of the present scheduler."""
        return self._scheduler.pid

    def check(self) -> None:
        """Raises: WorkerError when the scheduler has ended by itself, after saying why."""
        if self._scheduler.is_alive():
            return
        exit_status = self._scheduler.stop(0.0)
        if exit_status is None or exit_status >= 0:
            raise WorkerError(f"the scheduler ended with status {exit_status}; its last line says why")
        logger.warning("scheduler died signal=%d, starting it again", -exit_status)
        self._scheduler = self._new()
        self._scheduler.start()

    def wait_ready(self, client: ControlClient) -> None:
        """Waits until our own scheduler answers. If another one has the channel, ours ends and says so."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.check()
            try:
                reply = client.ask(Status(seq=client.next_seq()), timeout_s=POLL_S)
            except ChannelError:  # not there yet
                continue
            if isinstance(reply, Answer) and reply.body["scheduler_pid"] == self.scheduler_pid:
                return
            time.sleep(POLL_S)
        raise WorkerError(f"the scheduler, pid {self.scheduler_pid}, does not answer after {START_S:.0f} s")

    def stop(self) -> None:
        """Ends the scheduler; its state stays in the channel."""
        self._scheduler.stop()


def main(argv: Sequence[str]) -> int:
    """``rose sched serve [CLUSTER.yaml]``."""
    settings = Settings.from_environment()
    arguments = _parser(settings).parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    folder = make_private_dir(arguments.folder, "choose another with --folder")
    node = ScheduledNode(arguments.channel, arguments.cluster)
    cluster = load_yaml(arguments.cluster, ServeSpec) if arguments.cluster is not None else ServeSpec()
    admin_key(cluster.router, settings)  # refused here, where its user looks
    make_engine = _engine(cluster, arguments.channel, folder, settings)
    page = make_page(arguments, settings)
    with StopOnSignals():
        node.start()
        try:
            _run(node, page, arguments, make_engine)
        finally:
            if page is not None:
                page.stop()
            node.stop()
    return 0


def _run(
    node: ScheduledNode,
    page: DashboardProcess | None,
    arguments: argparse.Namespace,
    make_engine: Callable[[], Engine],
) -> None:
    with ControlClient(joined(arguments.channel), START_S) as client:
        node.wait_ready(client)
        engine = make_engine()

        def check() -> None:
            node.check()
            engine.check()
            if page is not None:
                page.check()

        runner = Runner(client, engine)
        try:
            runner.run(check)
        finally:
            runner.close()


def _engine(cluster: ServeSpec, channel: str, folder: Path, settings: Settings) -> Callable[[], Engine]:
    """Returns what makes the engine. Raises: ConfigError if Ray is asked for and not installed."""
    if cluster.ray is None:
        return lambda: HostEngine(channel, folder, cache_root(settings, channel))
    if find_spec("ray") is None:
        raise ConfigError(f"the cluster's file has `ray`, which is not installed; {install_hint('ray')}")

    def on_ray() -> Engine:
        from rose.jobs.on_ray.engine import RayEngine  # loads Ray

        return RayEngine(cluster, ChannelUrl.parse(channel).url, folder)

    return on_ray


def cache_root(settings: Settings, channel: str) -> Path:
    """Returns the folder of cached state, by channel: two schedulers may have jobs of the same name."""
    return settings.staging_root / "jobs" / f"{zlib.crc32(channel.encode()):08x}"


def joined(channel: str) -> ClientSide:
    """Returns a runner's end of the channel."""
    return ChannelUrl.parse(channel).join(f"runner:{os.uname().nodename}")


def _parser(settings: Settings) -> CommandParser:
    parser = channel_parser(
        "serve",
        "Schedules whole RL jobs on shared nodes, and runs them on this machine or on a Ray cluster.",
        "rose sched serve cluster.yaml --channel redis://127.0.0.1:6379/0",
    )
    parser.add_argument(
        "cluster",
        nargs="?",
        type=Path,
        metavar="CLUSTER.yaml",
        help="pools, prices, groups and limits (default: pools without a limit, and no fixed group)",
    )
    add_folder_and_page(parser, settings)
    return parser


def add_folder_and_page(parser: CommandParser, settings: Settings) -> None:
    """Adds the flags of every command that runs jobs."""
    parser.add_argument(
        "--folder",
        type=Path,
        default=settings.runtime_dir / "jobs",
        help="where job files and logs go (default: %(default)s)",
    )
    parser.add_argument(
        "--http",
        metavar="[HOST:]PORT",
        help="also serve the dashboard and /metrics there (default: nowhere)",
    )
    add_node_flag(parser)
    add_insecure_flag(parser)


def make_page(arguments: argparse.Namespace, settings: Settings) -> DashboardProcess | None:
    """Returns the dashboard that these flags ask for. Raises: ConfigError if it can't, or may not, listen."""
    if arguments.http is None:
        return None
    key, is_insecure = settings.dashboard_key, arguments.insecure
    return DashboardProcess(
        arguments.http, arguments.channel, key, is_insecure=is_insecure, nodes=arguments.node
    )


if __name__ == "__main__":
    sys.exit(run_command("sched serve", main, sys.argv[1:]))
