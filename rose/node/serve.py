"""`rose serve`: one vLLM engine, in a pool or dedicated to rollouts. An engine that follows a run's weights
has its subscriber beside it, and a serving engine that is fine-tuned has its trainer. Everything that can be
checked is checked before vLLM starts, and nothing is left running at the end. vLLM's own flags pass through
unread.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from typing import Any, get_args

from rose import ports
from rose.arguments import BAD_INPUT_STATUS, CommandParser, add_insecure_flag, run_command
from rose.config import Settings, parse_config
from rose.engine.settings import EngineSettings
from rose.errors import ConfigError, WorkerError
from rose.node import checks, launch
from rose.node.fine_tune import options as fine_tune_options
from rose.node.fine_tune.options import FineTuneOptions
from rose.node.fine_tune.processes import FineTuning
from rose.node.node_config import EngineConfig
from rose.node.processes import ProcessGroup, ServerProcess
from rose.node.signals import StopOnSignals
from rose.types import Role

logger = logging.getLogger(__name__)

EXAMPLE = "rose serve ./models/policy --role rollout --pool gpu0 --port 8001 --max-model-len 2048"
WATCH_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Runs the engine until it ends or a signal comes. Returns vLLM's exit status, 0 after a signal."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    engine, options = _engine_config(list(argv))
    settings = Settings.from_environment()
    launch.remove_dead_status_pages(settings)
    if options is not None and engine.pool is None and engine.num_data_ranks > 1:
        raise ConfigError(
            f"--fine-tune with --data-parallel-size {engine.num_data_ranks}: it starts a pool for one rank "
            f"alone; start the pools of all ranks with rose pool, and name the first one with --pool"
        )
    for rank, pool in enumerate(engine.pools):
        checks.check_pool(settings, pool, rank)
    check_engine(engine)
    tuning = None
    if options is not None:
        num_gpus = engine.num_gpus if checks.GPU_DRIVER.exists() else 0
        options = options.within(engine.vllm_flag("--max-model-len"))
        fine_tune_options.check(options, engine.model, num_gpus)
        tuning = FineTuning(options, engine)
        engine = tuning.engine
    with ExitStack() as when_ended:
        when_ended.callback(launch.remove_staging_dir, engine, settings)
        with StopOnSignals(), ProcessGroup() as group, ExitStack() as before_all_stop:
            if tuning is not None:
                before_all_stop.callback(tuning.let_save)
                tuning.start_ahead(group, settings)
            return _run(engine, settings, group, when_ended, tuning)
    return 0  # a signal


def check_engine(engine: EngineConfig) -> None:
    """Raises: ConfigError for anything but its pool that would keep ``engine`` from starting."""
    checks.check_vllm()
    ports.check_port_free(engine.host, engine.port)
    launch.check_cpus(engine)
    launch.check_engine_exposure(engine)
    checks.check_relay(engine)
    checks.check_adapters(engine)
    checks.check_model(engine.model)


def _run(
    engine: EngineConfig,
    settings: Settings,
    group: ProcessGroup,
    when_ended: ExitStack,
    tuning: FineTuning | None,
) -> int:
    server = group.start(launch.engine_process(engine, log_path=None))
    when_ended.callback(launch.remove_status_page, engine, server, settings)
    try:
        launch.wait_engine_ready(server, engine, settings)
    except WorkerError:
        if server.exit_status == BAD_INPUT_STATUS:
            return BAD_INPUT_STATUS  # the engine has printed what it refuses
        raise
    logger.info("ready url=%s role=%s pool=%s", engine.url, engine.role, engine.pool)
    subscribers = launch.subscriber_processes([engine], settings, log_dir=None)
    for subscriber in subscribers:
        group.start(subscriber)
    if tuning is not None:
        tuning.start_trainer(group)
    while server.is_alive():
        for subscriber in [each for each in subscribers if not each.is_alive()]:
            subscribers.remove(subscriber)
            _lose(subscriber, engine)
        if tuning is not None:
            tuning.watch()
        server.wait(WATCH_S)
    logger.error("died name=%s status=%s", server.name, server.exit_status)
    return server.exit_status or 1


def _lose(subscriber: ServerProcess, engine: EngineConfig) -> None:
    """Ends a rollout engine that lost its subscriber: it would serve old weights for ever. A serving engine
    goes on with those that it has."""
    problem = f"{subscriber.name} ended with status {subscriber.exit_status}"
    if engine.role is Role.ROLLOUT:
        raise WorkerError(f"{problem}; stopping the engine")
    logger.error("%s: no new weights go live, serving goes on", problem)


def _engine_config(argv: list[str]) -> tuple[EngineConfig, FineTuneOptions | None]:
    parser = _parser()
    arguments, vllm_args = parser.parse_known_args(argv)
    if argv and argv[0] != arguments.model:
        parser.error("MODEL comes first: rose serve MODEL --role ... (flags of vLLM would swallow it)")
    given: dict[str, Any] = {key: value for key, value in vars(arguments).items() if value is not None}
    options = fine_tune_options.take_options(given)
    if options is not None:
        _check_fine_tuned(given)
        given.setdefault("role", Role.SERVING)
    elif "role" not in given:
        parser.error("the following arguments are required: --role")
    elif given["role"] == Role.SERVING and "pool" not in given:
        parser.error(
            "--role serving needs --pool: a serving engine shares its GPU's memory with rollouts; start one "
            "with rose pool NAME, or serve with vLLM alone"
        )
    if "cpus" in given:
        given["cpus"] = given["cpus"].split(",")
    return parse_config({**given, "vllm_args": vllm_args}, EngineConfig, "flags", _flag), options


def _check_fine_tuned(given: dict[str, Any]) -> None:
    """Raises: ConfigError for flags that don't go with --fine-tune."""
    if given.get("role") == Role.ROLLOUT:
        raise ConfigError("--fine-tune: a rollout engine has a trainer of its own; use --role serving")
    for name in ("relay", "run", "adapters"):
        if name in given:
            raise ConfigError(f"--fine-tune: it brings a relay of its own; leave {_flag(name)} out")
    if given.get("takes_weights", "true").lower() in ("false", "0", "no", "off"):
        raise ConfigError(
            "--fine-tune with --takes-weights false: the trained weights go live in the engine; leave "
            "--takes-weights out"
        )


def _flag(key: str) -> str:
    if key == "adapters":
        return "--adapter"
    return f"--{key.replace('_', '-')}"


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose serve",
        "Starts one vLLM engine that shares the KV slabs of a pool, or a dedicated rollout engine.\n"
        "Flags not listed here go to vLLM.",
        EXAMPLE,
    )
    parser.add_argument("model", metavar="MODEL", help="a model directory or hub id; must come first")
    parser.add_argument(
        "--role",
        choices=[str(role) for role in Role],
        help="what the engine is for (with --fine-tune: serving)",
    )
    parser.add_argument(
        "--pool",
        metavar="NAME",
        help="the slab pool (see rose pool). With --data-parallel-size, rank 0 has the pool NAME, and rank N "
        "NAME-N. Without a pool a rollout engine has vLLM's own KV cache, and --fine-tune starts a pool",
    )
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    add_insecure_flag(parser)
    parser.add_argument("--port", default=8000, help="port to listen on (default 8000)")
    parser.add_argument("--cpus", metavar="N,N", help="CPUs for the whole engine (default: all)")
    parser.add_argument("--relay", metavar="URL", help="the relay that brings new weights")
    parser.add_argument(
        "--run", metavar="RUN_ID", help="the run to follow (default: the only live run; with --adapter, none)"
    )
    parser.add_argument(
        "--adapter",
        metavar="RUN_ID",
        action="append",
        dest="adapters",
        help="follow the LoRA adapter of this run, which turns name as their model; may be repeated (needs "
        "vLLM's --enable-lora)",
    )
    parser.add_argument("--staging", metavar="DIR", help="folder for new weights (default: one in memory)")
    fine_tune_options.add_flags(parser)
    _add_plugin_flags(parser)
    return parser


def _add_plugin_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per field of EngineSettings; its text and default are the field's."""
    flags = parser.add_argument_group("settings of the plugin")
    for name, field in EngineSettings.model_fields.items():
        if name in ("role", "pool", "insecure"):
            continue
        note = " ".join((field.description or "").split()).rstrip(".")
        if field.default not in (None, ""):
            note += f" (default: {str(field.default).lower()})"
        flags.add_argument(
            _flag(name), metavar=_metavar(name, field.annotation), help=note.replace("%", "%%")
        )


def _metavar(name: str, annotation: Any) -> str:
    """The values that a setting takes: its choices, its unit, or the kind of value."""
    kinds = [kind for kind in (get_args(annotation) or (annotation,)) if kind is not type(None)]
    if issubclass(kinds[0], StrEnum):
        return "|".join(kinds[0])
    unit = name.rpartition("_")[2].upper()
    return {bool: "true|false", int: "N", float: unit if unit in ("S", "MS") else "X", str: "TEXT"}[kinds[0]]


if __name__ == "__main__":
    sys.exit(run_command("serve", main, sys.argv[1:]))
