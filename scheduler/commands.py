"""`rose sched COMMAND ...`: the cluster scheduler's commands.

Owns: their list. Promises: a command's modules are imported only when it runs. Never: does a command's work.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rose.arguments import BAD_INPUT_STATUS, CommandParser


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedCommand:
    """``module.function(argv) -> int``."""

    name: str
    module: str
    function: str
    summary: str


_RUNTIME = "rose.scheduler.runtime.commands"
COMMANDS = (
    SchedCommand(
        name="serve", module="rose.node.sched", function="main", summary="schedule and run jobs here"
    ),
    SchedCommand(name="submit", module=_RUNTIME, function="submit", summary="place a job and start it"),
    SchedCommand(name="status", module=_RUNTIME, function="status", summary="jobs, and what they wait for"),
    SchedCommand(name="cancel", module=_RUNTIME, function="cancel", summary="end a job"),
    SchedCommand(name="logs", module=_RUNTIME, function="logs", summary="what a job has printed"),
    SchedCommand(name="drain", module=_RUNTIME, function="drain", summary="place no more jobs on a node"),
)


def main(argv: Sequence[str]) -> int:
    """Runs one of them; its exit status."""
    parser = CommandParser(
        "rose sched",
        "Whole RL jobs on shared rollout and training nodes.\n\ncommands:\n"
        + "\n".join(f"  {command.name:<9}{command.summary}" for command in COMMANDS)
        + "\n\n`rose sched COMMAND --help` explains one of them.",
        "rose sched serve cluster.yaml",
    )
    if not argv:
        parser.print_help(sys.stderr)
        return BAD_INPUT_STATUS
    if argv[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    by_name = {command.name: command for command in COMMANDS}
    if argv[0] not in by_name:
        close = difflib.get_close_matches(argv[0], by_name, n=1)
        fix = f"did you mean {close[0]}?" if close else f"there are {', '.join(by_name)}"
        parser.error(f"no command {argv[0]!r}; {fix}")
    command = by_name[argv[0]]
    status: int = getattr(importlib.import_module(command.module), command.function)(argv[1:])
    return status
