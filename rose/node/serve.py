"""`rose serve`: one vLLM engine in a pool, with the weight subscriber of a rollout engine beside it.

Owns: the flags of the command and the life of the two processes. Promises: whatever can be checked is checked
before vLLM starts; nothing is left running. Never: parses vLLM's own flags, which pass through.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rose.arguments import BAD_INPUT_STATUS, CommandParser, run_command
from rose.config import Settings, parse_config
from rose.engine.settings import EngineSettings
from rose.errors import WorkerError
from rose.node import checks, launch
from rose.node.node_config import EngineConfig
from rose.node.processes import ProcessGroup, ServerProcess
from rose.node.signals import StopOnSignals

logger = logging.getLogger(__name__)

EXAMPLE = "rose serve ./models/policy --role rollout --pool gpu0 --port 8001 --max-model-len 2048"
WATCH_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Runs the engine until it ends or a signal comes. Returns vLLM's exit status, 0 after a signal."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    engine = _engine_config(list(argv))
    settings = Settings.from_environment()
    if engine.pool is not None:
        checks.check_pool(settings, engine.pool)
    check_engine(engine)
    with ExitStack() as when_ended:
        when_ended.callback(launch.remove_staging_dir, engine, settings)
        with StopOnSignals(), ProcessGroup() as group:
            return _run(engine, settings, group, when_ended)
    return 0  # a signal


def check_engine(engine: EngineConfig) -> None:
    """Raises: ConfigError for whatever would stop ``engine`` from starting, the pool aside."""
    checks.check_vllm()
    checks.check_port_free(engine.host, engine.port)
    launch.check_cpus(engine)
    checks.check_model(engine.model)


def _run(engine: EngineConfig, settings: Settings, group: ProcessGroup, when_ended: ExitStack) -> int:
    server = group.start(launch.engine_process(engine, log_path=None))
    when_ended.callback(launch.remove_status_page, engine, server, settings)
    try:
        launch.wait_engine_ready(server, engine, settings)
    except WorkerError:
        if server.exit_status == BAD_INPUT_STATUS:
            return BAD_INPUT_STATUS  # the engine has said in one line what it refuses
        raise
    logger.info("ready url=%s role=%s pool=%s", engine.url, engine.role, engine.pool)
    subscriber = launch.subscriber_process(engine, settings, log_path=None)
    if subscriber is not None:
        group.start(subscriber)
    while server.is_alive():
        _check_subscriber(subscriber)
        server.wait(WATCH_S)
    logger.error("died name=%s status=%s", server.name, server.exit_status)
    return server.exit_status or 1


def _check_subscriber(subscriber: ServerProcess | None) -> None:
    """Without its subscriber a rollout engine would serve old weights for ever: end it instead."""
    if subscriber is not None and not subscriber.is_alive():
        raise WorkerError(
            f"{subscriber.name} ended with status {subscriber.exit_status}; stopping the engine"
        )


def _engine_config(argv: list[str]) -> EngineConfig:
    parser = _parser()
    arguments, vllm_args = parser.parse_known_args(argv)
    if argv and argv[0] != arguments.model:
        parser.error("MODEL comes first: rose serve MODEL --role ... (flags of vLLM would swallow it)")
    given: dict[str, Any] = {key: value for key, value in vars(arguments).items() if value is not None}
    if "cpus" in given:
        given["cpus"] = given["cpus"].split(",")
    return parse_config({**given, "vllm_args": vllm_args}, EngineConfig, "flags", _flag)


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose serve",
        "Starts one vLLM engine that shares a pool's KV slabs. Flags not listed here go to vLLM.",
        EXAMPLE,
    )
    parser.add_argument("model", metavar="MODEL", help="a model directory or hub id; comes first")
    parser.add_argument(
        "--role", required=True, choices=["serving", "rollout"], help="what the engine is for"
    )
    parser.add_argument("--pool", required=True, help="name of the slab pool (see rose pool)")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", default=8000, help="port to listen on (default 8000)")
    parser.add_argument("--cpus", metavar="N,N", help="pin the whole engine to these CPUs")
    parser.add_argument("--relay", metavar="URL", help="follow new weights over this relay (rollout only)")
    parser.add_argument("--run", metavar="RUN_ID", help="the trainer's run to follow (default: the newest)")
    parser.add_argument("--staging", metavar="DIR", help="folder for new weights (default: one in memory)")
    _add_plugin_flags(parser)
    return parser


def _add_plugin_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of EngineSettings, so that the two can't drift apart."""
    flags = parser.add_argument_group("settings of the plugin")
    for name, field in EngineSettings.model_fields.items():
        if name in ("role", "pool"):
            continue
        default = field.default.value if hasattr(field.default, "value") else field.default
        note = f"default {default}" if default not in (None, "") else "optional"
        flags.add_argument(_flag(name), metavar=name.rpartition("_")[2].upper(), help=note)


if __name__ == "__main__":
    sys.exit(run_command("serve", main, sys.argv[1:]))
