"""`rose profile`: measures a model's step times on this machine, for the gate to start from; or how many
rollouts it should run at once, for the router.

Owns: the flags and the life of the engine that is measured. Promises: the engine has no pool and no
co-runner, and is stopped also on an error; the profile is stored where `rose serve` looks for it.
Never fits anything itself: the engine measures its own steps (rose/engine/http/profiling.py).
"""

import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from rose.admission.profile import observation_of, plot_profile
from rose.admission.step_time import StepTimeModel
from rose.arguments import CommandParser, positive_int, run_command
from rose.config import Settings, parse_config
from rose.errors import ConfigError
from rose.messages import ConcurrencyProfile, Profile
from rose.node import checks, concurrency, launch
from rose.node.control import EngineControl
from rose.node.node_config import EngineConfig
from rose.node.processes import ProcessGroup
from rose.node.signals import StopOnSignals
from rose.ports import free_port
from rose.types import Role

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
PROFILE_TIMEOUT_S = 1800.0
"""A large model on a CPU takes seconds for each of its longest steps."""
NO_MATPLOTLIB = "matplotlib, which is not installed; run: pip install matplotlib"

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flags:
    engine: EngineConfig
    plot: Path | None
    max_concurrency: int | None
    """None: step times are measured, not concurrency."""


def main(argv: Sequence[str]) -> int:
    """Prints what was measured and its file; 130 when a signal came first. Raises: RoseError."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    flags = _read_flags(argv)
    settings = Settings.from_environment()
    if flags.plot is not None:
        _check_plot(flags.plot)
    checks.check_vllm()
    checks.check_model(flags.engine.model)
    console = Console()
    with StopOnSignals():
        if flags.max_concurrency is not None:
            _profile_concurrency(flags.engine, flags.max_concurrency, settings, console)
        else:
            _profile_steps(flags.engine, flags.plot, settings, console)
        return 0
    return 130  # a signal


def _profile_steps(engine: EngineConfig, plot: Path | None, settings: Settings, console: Console) -> None:
    profile = measure(engine, settings, console, lambda control: control.profile(PROFILE_TIMEOUT_S))
    console.print(profile_page(profile.model))
    stored = settings.profile_dir / profile.file
    console.print(f"stored: {stored}", soft_wrap=True)
    draw(profile, plot if plot is not None else stored.with_suffix(".png"), console)


def draw(profile: Profile, path: Path, console: Console) -> None:
    """Draws one plot per profile, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        console.print(f"no plot without {NO_MATPLOTLIB}", soft_wrap=True)
        return
    observations = [observation_of(one) for one in profile.observations]
    plot_profile(StepTimeModel.from_json(profile.model), observations, path)
    console.print(f"plotted: {path}", soft_wrap=True)


def _profile_concurrency(
    engine: EngineConfig, max_concurrency: int, settings: Settings, console: Console
) -> None:
    profile = measure(
        engine,
        settings,
        console,
        lambda control: concurrency.measure_concurrency(
            control, max_concurrency=max_concurrency, gpus=engine.num_gpus
        ),
    )
    name = re.sub(r"[^A-Za-z0-9.]+", "-", str(Path(engine.model).name)).strip("-")
    path = settings.profile_dir / f"concurrency-{name}.json"
    concurrency.store(profile, path)
    console.print(concurrency_page(profile))
    console.print(f"stored: {path}  (rose router --concurrency-profile {path})", soft_wrap=True)


def measure(
    engine: EngineConfig, settings: Settings, console: Console, ask: Callable[[EngineControl], Found]
) -> Found:
    """Starts the engine, measures it and stops it. Raises: WorkerError with the end of its log."""
    log_path = settings.make_runtime_dir() / "logs" / f"profile-{engine.port}.log"
    server = launch.engine_process(engine, log_path)
    with (
        closing(EngineControl(engine.url, _served_name(engine))) as control,
        ExitStack() as stack,
        ProcessGroup() as group,
    ):
        with console.status(f"starting {engine.model} (log: {log_path})"):
            group.start(server)
            stack.callback(launch.remove_status_page, engine, server, settings)
            launch.wait_engine_ready(server, engine, settings)
        with console.status("measuring; keep the machine quiet"):
            return ask(control)


def profile_page(model: Mapping[str, float]) -> Table:
    """Describes the step-time model in words; times are in milliseconds, as operators read them."""
    table = Table(title="time of one step", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("part")
    table.add_column("figure", justify="right")
    for label, key in (
        ("base", "base_s"),
        ("per prefill token", "per_prefill_token_s"),
        ("per 1000 tokens that it attends", "per_prefill_pair_s"),
        ("per decode", "per_decode_s"),
        ("per 1000 tokens of its context", "per_context_token_s"),
    ):
        unit = 1e6 if "1000" in label else 1e3
        table.add_row(label, f"{model[key] * unit:.4f} ms")
    table.add_row("observed/predicted, 99th percentile", f"{model['ratio_q99']:.2f}")
    table.add_row("fixed margin", f"{model['margin_s'] * 1e3:.2f} ms")
    return table


def concurrency_page(profile: ConcurrencyProfile) -> Table:
    """Shows the throughput by concurrent turns, and the cap."""
    title = f"rollout throughput, {profile.context_tokens} tokens of context each"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("concurrent turns", "tokens/s", ""):
        table.add_column(column, justify="right" if column else "left")
    for point in profile.points:
        note = f"cap: {profile.turns_per_gpu} per GPU" if point.concurrency == profile.cap else ""
        table.add_row(str(point.concurrency), f"{point.tokens_per_s:.1f}", note)
    return table


def _check_plot(path: Path) -> None:
    """Raises: ConfigError before minutes are spent on measuring."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {path}: expected a name that ends with {', '.join(PLOT_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: no such folder; create {path.absolute().parent} first")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"--plot needs {NO_MATPLOTLIB}")


def _served_name(engine: EngineConfig) -> str:
    """Returns what a completion has to call the model."""
    named = engine.vllm_flag("--served-model-name")
    return named if named is not None else engine.model


def _read_flags(argv: Sequence[str]) -> _Flags:
    parser = _parser()
    arguments, vllm_args = parser.parse_known_args(argv)
    if argv[0] != arguments.model:
        parser.error("MODEL comes first: rose profile MODEL ... (flags of vLLM would swallow it)")
    if arguments.concurrency is not None:
        if arguments.concurrency < 1:
            parser.error(f"--concurrency {arguments.concurrency}: expected at least 1 turn at once")
        if arguments.role is Role.SERVING or arguments.plot is not None:
            parser.error(
                "--concurrency is about rollouts and has no plot: leave out --role serving and --plot"
            )
    default = Role.SERVING if arguments.concurrency is None else Role.ROLLOUT
    role = arguments.role if arguments.role is not None else default
    given = {"model": arguments.model, "role": role, "port": free_port()}
    engine = parse_config({**given, "vllm_args": vllm_args}, EngineConfig, "flags")
    return _Flags(engine=engine, plot=arguments.plot, max_concurrency=arguments.concurrency)


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose profile",
        "Measures how long this machine takes for steps of MODEL. Give MODEL and vLLM's flags as `rose "
        "serve` will get them, and let nothing else run meanwhile.\nFlags not listed here go to vLLM.",
        "rose profile ./models/chat --role serving --max-model-len 2048",
    )
    parser.add_argument("model", metavar="MODEL", help="a model directory or hub id; must come first")
    parser.add_argument(
        "--role",
        type=Role,
        choices=list(Role),
        help="the engine's role (default serving; with --concurrency rollout)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PATH.png",
        help="where to draw observed and fitted step times (default: beside the stored profile)",
    )
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        nargs="?",
        const=concurrency.MAX_CONCURRENCY,
        metavar="MAX",
        help="measure rollout throughput at 1, 2, 4, ... MAX turns at once (default %(const)s) and pick the "
        "router's cap, instead of step times",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_command("profile", main, sys.argv[1:]))
