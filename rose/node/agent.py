"""`rose node NODE.yaml`: a pool and its engines under one supervisor.

The pool starts first, then serving engines, then rollout engines. Each death is one error line in the log.
A pool's daemon that dies is started again, unless it keeps dying (pool_keeper.py); its engines keep its
memory and go on meanwhile. An engine's death leaves the others running, and ends the subscriber that fed it
alone, so that the engine can be started by hand. Engines are not started again: an operator has to look at a
serving engine that dies.
"""

import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn

from rose.arguments import CommandParser, add_insecure_flag, run_command
from rose.config import Settings, load_yaml
from rose.errors import ConfigError, WorkerError
from rose.node import checks, launch
from rose.node.node_config import NODE_EXAMPLE, NodeConfig
from rose.node.pool_keeper import PoolKeeper
from rose.node.processes import ProcessGroup, ServerProcess
from rose.node.serve import check_engine
from rose.node.signals import StopOnSignals
from rose.types import Role

logger = logging.getLogger(__name__)

WATCH_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Runs the node until a signal comes (0), or until the last engine has died (1)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    arguments = _parser().parse_args(list(argv))
    settings = Settings.from_environment()
    node = load_yaml(arguments.file, NodeConfig)
    if arguments.insecure:
        node = node.opened()
    _check(node, settings, arguments.file)
    launch.remove_dead_status_pages(settings)
    log_dir = arguments.log_dir if arguments.log_dir is not None else settings.make_runtime_dir() / "logs"
    with ExitStack() as when_ended:
        for engine in node.engines:
            when_ended.callback(launch.remove_staging_dir, engine, settings)
        with StopOnSignals(), ProcessGroup() as group:
            pools = _start_pools(node, settings, log_dir, group)
            keeper = PoolKeeper(group, pools, partial(launch.pool_processes, node, log_dir))
            engines = _start(node, settings, log_dir, group, when_ended)
            fed = _start_subscribers(node, settings, log_dir, group, engines)
            _watch(group, keeper, engines.values(), fed)
    return 0  # a signal


def _check(node: NodeConfig, settings: Settings, path: Path) -> None:
    """Checks before anything is started. Raises: ConfigError with the file's name."""
    try:
        for pool in node.pool_names:
            _check_pool_unowned(pool, settings)
        for engine in node.engines:
            check_engine(engine)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_pool_unowned(pool: str, settings: Settings) -> None:
    if checks.has_pool(settings, pool):
        raise ConfigError(
            f"pool {pool} is already owned: a daemon answers at {settings.pool_socket(pool)}; "
            "stop it, or choose another name for the pool"
        )


def _start_pools(
    node: NodeConfig, settings: Settings, log_dir: Path, group: ProcessGroup
) -> list[ServerProcess]:
    """Starts the pools, and returns them once all answer."""
    pools = launch.pool_processes(node, log_dir)
    for name, process in zip(node.pool_names, pools, strict=True):
        group.start(process)
        is_up = partial(checks.has_pool, settings, name)
        process.wait_until(is_up, "answer", launch.POOL_READY_TIMEOUT_S)
    return pools


def _start(
    node: NodeConfig, settings: Settings, log_dir: Path, group: ProcessGroup, when_ended: ExitStack
) -> dict[str, ServerProcess]:
    """Starts serving engines and rollout engines, each once the last is ready; returns them by URL."""
    servers = {}
    for engine in sorted(node.engines, key=lambda each: each.role is Role.ROLLOUT):
        server = group.start(launch.engine_process(engine, log_dir / f"{engine.name}.log"))
        when_ended.callback(launch.remove_status_page, engine, server, settings)
        launch.wait_engine_ready(server, engine, settings)
        logger.info("ready name=%s url=%s", engine.name, engine.url)
        servers[engine.url] = server
    return servers


def _start_subscribers(
    node: NodeConfig,
    settings: Settings,
    log_dir: Path,
    group: ProcessGroup,
    engines: Mapping[str, ServerProcess],
) -> dict[ServerProcess, set[ServerProcess]]:
    """Starts the subscribers; returns each with the engines that it feeds."""
    started = map(group.start, launch.subscriber_processes(node.engines, settings, log_dir))
    return {each: {server for url, server in engines.items() if url in each.argv} for each in started}


def _watch(
    group: ProcessGroup,
    keeper: PoolKeeper,
    engines: Iterable[ServerProcess],
    fed: Mapping[ServerProcess, set[ServerProcess]],
) -> NoReturn:
    """Reports deaths, and starts pools again. Raises: WorkerError when the last engine has died."""
    reported = set[ServerProcess]()
    while True:
        for server in group.dead():
            if server not in reported:
                reported.add(server)
                logger.error(
                    "died name=%s status=%s log=%s", server.name, server.exit_status, server.log_path
                )
        if reported.issuperset(engines):
            raise WorkerError("every engine of this node has died; see the log lines above")
        for subscriber in fed.keys() - reported:
            if reported.issuperset(fed[subscriber]):
                subscriber.stop()
                reported.add(subscriber)
        keeper.keep()
        reported.intersection_update(group.servers)
        time.sleep(WATCH_S)


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose node",
        "Starts a pool and its engines, reports when one dies, and stops all on a signal. NODE.yaml:\n\n"
        + NODE_EXAMPLE,
        "rose node NODE.yaml",
    )
    parser.add_argument(
        "file", metavar="NODE.yaml", type=Path, help="what runs on this GPU (see examples/node.yaml)"
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="folder of the logs (default: logs in the runtime directory)",
    )
    add_insecure_flag(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run_command("node", main, sys.argv[1:]))
