"""`rose COMMAND ...`: finds the command and runs it.

A command's modules are imported only when it runs. A package that it lacks is named with the extra that
brings it.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rose import __version__
from rose.arguments import BAD_INPUT_STATUS, INTERRUPTED_STATUS, CommandParser, name_among, run_command
from rose.errors import install_hint

_EXTRAS = {
    "vllm": ("cpu", "cuda"),
    "torch": ("cpu", "cuda"),
    "mooncake": ("mooncake",),
    "redis": ("redis",),
    "ortools": ("cluster",),
    "accelerate": ("train",),
    "datasets": ("train",),
    "gymnasium": ("train",),
    "matplotlib": ("train",),
    "opentelemetry": ("otel",),
    "ray": ("ray",),
    "transformers": ("train",),
    "trl": ("train",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand: ``module.main(argv) -> int``, which raises a RoseError if it fails."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command(
        name="doctor", module="rose.doctor", summary="show what is installed, what is missing, what will work"
    ),
    Command(name="demo", module="rose.demo.run", summary="run the whole system on this machine"),
    Command(
        name="pool",
        module="rose.memory.daemon.daemon",
        summary="own one GPU's KV slabs and hand them to engines",
    ),
    Command(name="serve", module="rose.node.serve", summary="start one vLLM engine, serving or rollout"),
    Command(name="node", module="rose.node.agent", summary="start a pool and its engines from NODE.yaml"),
    Command(
        name="relay", module="rose.transfer.relay.server", summary="carry weights from a trainer to engines"
    ),
    Command(
        name="router",
        module="rose.scheduler.rollout.http.command",
        summary="place rollout turns on engines, behind one endpoint",
    ),
    Command(
        name="front",
        module="rose.engine.front.command",
        summary="put vLLM's API server, with tools and reasoning, before the router",
    ),
    Command(
        name="ray", module="rose.ray.command", summary="start relay, engines and router on a Ray cluster"
    ),
    Command(
        name="sched",
        module="rose.scheduler.runtime.command.sched",
        summary="schedule whole RL jobs on shared nodes",
    ),
    Command(name="profile", module="rose.node.profile", summary="measure the step times that the gate needs"),
    Command(name="top", module="rose.node.top", summary="show running engines live"),
    Command(name="harm", module="rose.node.harm", summary="show what rollouts cost serving, as measured"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    if not given:
        _parser().print_help(sys.stderr)
        return BAD_INPUT_STATUS
    arguments = _parser().parse_args(given)
    command = _find(arguments.command)
    try:
        module = importlib.import_module(command.module)
        return run_command(command.name, module.main, arguments.arguments)
    except ModuleNotFoundError as error:
        return _missing_module(command, error)
    except KeyboardInterrupt:  # while the command's modules were being imported
        return INTERRUPTED_STATUS


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose",
        "RL rollouts in the slack of GPUs that already serve traffic.\n\ncommands:\n"
        + "\n".join(f"  {command.name:<9}{command.summary}" for command in COMMANDS)
        + "\n\n`rose COMMAND --help` explains one of them.",
        "rose doctor",
    )
    parser.add_argument("--version", action="version", version=f"rose {__version__}")
    parser.add_argument(
        "command",
        type=name_among([command.name for command in COMMANDS], "command"),
        metavar="COMMAND",
        help="a command of the list above",
    )
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="the command's own arguments"
    )
    return parser


def _find(name: str) -> Command:
    return next(command for command in COMMANDS if command.name == name)


def _missing_module(command: Command, error: ModuleNotFoundError) -> int:
    """Names the extra that brings a missing package. A missing module of ROSE itself is a bug, and raises."""
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        raise error
    print(
        f"rose: error: {command.name}: {package} is not installed; "
        f"{install_hint(*_EXTRAS[package])} (rose doctor shows the rest)",
        file=sys.stderr,
    )
    return BAD_INPUT_STATUS


if __name__ == "__main__":
    sys.exit(main())
