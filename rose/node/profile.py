"""`rose profile`: measures a model's step times on this machine, for the gate to start from.

Owns: the flags and the life of the engine that is measured. Promises: the engine has no pool and no
co-runner, and is stopped also on an error; the profile is stored where `rose serve` looks for it.
Never: fits anything itself: the engine measures its own steps (rose/engine/profiling.py).
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rose.admission.profile import observation_of, plot_profile
from rose.admission.step_time import StepTimeModel
from rose.arguments import CommandParser, run_command
from rose.config import Settings, parse_config
from rose.errors import ConfigError
from rose.messages import Profile
from rose.node import checks, launch
from rose.node.config import EngineConfig
from rose.node.control import EngineControl
from rose.node.processes import ProcessGroup
from rose.node.signals import StopOnSignals
from rose.types import Role

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
PROFILE_TIMEOUT_S = 1800.0
"""A large model on a CPU takes seconds for each of its longest steps."""


def main(argv: Sequence[str]) -> int:
    """Prints the fitted model and its file; 130 when a signal came first. Raises: RoseError."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    engine, plot_path = _read_flags(argv)
    settings = Settings.from_environment()
    if plot_path is not None:
        _check_plot(plot_path)
    checks.check_vllm()
    checks.check_model(engine.model)
    console = Console()
    with StopOnSignals():
        profile = measure(engine, settings, console)
        console.print(profile_page(profile.model))
        console.print(f"stored: {settings.profile_dir / profile.file}", soft_wrap=True)
        if plot_path is not None:
            observations = [observation_of(one) for one in profile.observations]
            plot_profile(StepTimeModel.from_json(profile.model), observations, plot_path)
            console.print(f"plotted: {plot_path}", soft_wrap=True)
        return 0
    return 130  # a signal


def measure(engine: EngineConfig, settings: Settings, console: Console) -> Profile:
    """Starts the engine, has it profile itself, stops it. Raises: WorkerError with the end of its log."""
    log_path = settings.make_runtime_dir() / "logs" / f"profile-{engine.port}.log"
    server = launch.engine_process(engine, log_path)
    with (
        closing(EngineControl(engine.url, engine.model)) as control,
        ExitStack() as stack,
        ProcessGroup() as group,
    ):
        with console.status(f"starting {engine.model} (log: {log_path})"):
            group.start(server)
            stack.callback(launch.remove_status_page, engine, server, settings)
            launch.wait_engine_ready(server, engine, settings)
        with console.status("measuring steps of many shapes; keep the machine quiet"):
            return control.profile(PROFILE_TIMEOUT_S)


def profile_page(model: Mapping[str, float]) -> Table:
    """The step-time model in words; times in milliseconds, as operators read them."""
    table = Table(title="time of one step", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("part")
    table.add_column("figure", justify="right")
    for label, key in (
        ("base", "base_s"),
        ("per prefill token", "per_prefill_token_s"),
        ("per decode", "per_decode_s"),
        ("per token of context", "per_context_token_s"),
    ):
        table.add_row(label, f"{model[key] * 1e3:.4f} ms")
    table.add_row("observed/predicted, 99th percentile", f"{model['ratio_q99']:.2f}")
    table.add_row("fixed margin", f"{model['margin_s'] * 1e3:.2f} ms")
    return table


def _check_plot(path: Path) -> None:
    """Raises: ConfigError before minutes are spent on measuring."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {path}: want a name that ends with {', '.join(PLOT_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: no such folder; create {path.absolute().parent} first")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; run: pip install matplotlib")


def _read_flags(argv: Sequence[str]) -> tuple[EngineConfig, Path | None]:
    parser = _parser()
    arguments, vllm_args = parser.parse_known_args(argv)
    if argv[0] != arguments.model:
        parser.error("MODEL comes first: rose profile MODEL ... (flags of vLLM would swallow it)")
    given = {"model": arguments.model, "role": arguments.role, "port": checks.free_port()}
    return parse_config({**given, "vllm_args": vllm_args}, EngineConfig, "flags"), arguments.plot


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose profile",
        "Measures how long this machine takes for steps of MODEL. Flags not listed here go to vLLM.\n"
        "Give MODEL and vLLM's flags as `rose serve` will get them; nothing else should run meanwhile.",
        "rose profile ./models/chat --role serving --max-model-len 2048",
    )
    parser.add_argument("model", metavar="MODEL", help="a model directory or hub id; comes first")
    parser.add_argument("--role", choices=list(Role), default=Role.SERVING, help="default %(default)s")
    parser.add_argument("--plot", type=Path, metavar="PATH.png", help="draw observed and fitted step times")
    return parser


if __name__ == "__main__":
    sys.exit(run_command("profile", main, sys.argv[1:]))
