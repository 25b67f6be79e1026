"""`rose sched ...`: finds the subcommand and runs it.

A subcommand's modules are imported only when it runs.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rose.arguments import BAD_INPUT_STATUS, CommandParser, name_among


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
    Subcommand(name="serve", module="rose.jobs.serve", summary="schedule jobs and run them"),
    Subcommand(name="profile", module="rose.jobs.profile", summary="measure the times of a job's phases"),
    Subcommand(
        name="profile-stages",
        module="rose.jobs.stage_times",
        summary="measure a model's passes by pipeline stage",
    ),
    Subcommand(
        name="slowdown",
        module="rose.jobs.slowdown",
        summary="measure what sub-stages cost one another on this machine",
    ),
    Subcommand(
        name="multiplex",
        module="rose.jobs.multiplex",
        summary="run two jobs on this machine, side by side where faster",
    ),
    Subcommand(name="submit", module=_JOBS, function="submit", summary="start a job, or queue it"),
    Subcommand(name="status", module=_STATUS, function="status", summary="show jobs and what they wait for"),
    Subcommand(
        name="dashboard",
        module="rose.scheduler.dashboard.server",
        summary="serve a page and metrics of a scheduler",
    ),
    Subcommand(name="events", module=_JOBS, function="events", summary="print what has happened, as JSON"),
    Subcommand(name="cancel", module=_JOBS, function="cancel", summary="end a job"),
    Subcommand(name="hold", module=_JOBS, function="hold", summary="keep a queued job from starting"),
    Subcommand(
        name="release", module=_JOBS, function="release", summary="put a held job back into the queue"
    ),
    Subcommand(name="logs", module=_JOBS, function="logs", summary="print a job's output"),
    Subcommand(name="drain", module=_JOBS, function="drain", summary="place no more jobs on a node"),
    Subcommand(
        name="simulate",
        module="rose.scheduler.sim.levels",
        function="simulate",
        summary="play a level of the scheduler: cluster, group, node or gpu",
    ),
    Subcommand(
        name="explain",
        module="rose.scheduler.sim.levels",
        function="explain",
        summary="say why a job runs where it runs, or why a level decides so",
    ),
    Subcommand(
        name="gantt",
        module="rose.scheduler.runtime.command.gantt",
        summary="draw when each job runs on which node",
    ),
)


def main(argv: Sequence[str]) -> int:
    """Runs one subcommand; returns its exit status."""
    width = max(len(each.name) for each in SUBCOMMANDS) + 2
    parser = CommandParser(
        "rose sched",
        "Schedules whole RL jobs on pools of rollout and training nodes.\n\nsubcommands:\n"
        + "\n".join(f"  {each.name:<{width}}{each.summary}" for each in SUBCOMMANDS),
        "rose sched simulate --policy lifetime",
    )
    parser.add_argument(
        "subcommand",
        type=name_among([each.name for each in SUBCOMMANDS], "subcommand"),
        metavar="SUBCOMMAND",
        help="a subcommand of the list above",
    )
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="the subcommand's own arguments"
    )
    if not argv:
        parser.print_help(sys.stderr)
        return BAD_INPUT_STATUS
    arguments = parser.parse_args(list(argv))
    subcommand = next(each for each in SUBCOMMANDS if each.name == arguments.subcommand)
    run = getattr(importlib.import_module(subcommand.module), subcommand.function)
    status: int = run(arguments.arguments)
    return status
