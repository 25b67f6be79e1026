"""`rose sched ...`: finds the subcommand and runs it.

Owns: the list of subcommands. Promises: one's modules are imported only when it runs. Never: does its work.
"""

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from rose.arguments import CommandParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """``module.function(argv) -> int``."""

    name: str
    module: str
    summary: str
    function: str = "main"


_JOBS = "rose.scheduler.runtime.command.jobs"
_STATUS = "rose.scheduler.runtime.command.status"
SUBCOMMANDS = (
    Subcommand(name="serve", module="rose.jobs.serve", summary="schedule jobs, and run them on this machine"),
    Subcommand(name="profile", module="rose.jobs.profile", summary="measure a job's phases for its file"),
    Subcommand(name="agent", module="rose.jobs.agent", summary="run jobs on this host's nodes"),
    Subcommand(name="submit", module=_JOBS, function="submit", summary="place a job and start it"),
    Subcommand(name="status", module=_STATUS, function="status", summary="jobs, and what they wait for"),
    Subcommand(
        name="dashboard", module="rose.scheduler.dashboard.server", summary="a page and metrics of all that"
    ),
    Subcommand(name="events", module=_JOBS, function="events", summary="who was granted what, and when"),
    Subcommand(name="cancel", module=_JOBS, function="cancel", summary="end a job"),
    Subcommand(name="logs", module=_JOBS, function="logs", summary="what a job has printed"),
    Subcommand(name="drain", module=_JOBS, function="drain", summary="place no more jobs on a node"),
    Subcommand(
        name="simulate", module="rose.scheduler.sim.simulate", summary="what a policy would cost on a trace"
    ),
    Subcommand(
        name="explain",
        module="rose.scheduler.runtime.command.explain",
        summary="why a job goes where it goes",
    ),
    Subcommand(
        name="gantt",
        module="rose.scheduler.runtime.command.gantt",
        summary="who runs when on which node of a group",
    ),
)


def main(argv: Sequence[str]) -> int:
    """Runs one subcommand; returns its exit status."""
    width = max(len(each.name) for each in SUBCOMMANDS) + 2
    parser = CommandParser(
        "rose sched",
        "Whole RL jobs on pools of rollout and training nodes.\n\nsubcommands:\n"
        + "\n".join(f"  {each.name:<{width}}{each.summary}" for each in SUBCOMMANDS),
        "rose sched simulate --policy lifetime",
    )
    parser.add_argument("subcommand", choices=[each.name for each in SUBCOMMANDS], metavar="SUBCOMMAND")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(list(argv))
    subcommand = next(each for each in SUBCOMMANDS if each.name == arguments.subcommand)
    run = getattr(importlib.import_module(subcommand.module), subcommand.function)
    status: int = run(arguments.arguments)
    return status
