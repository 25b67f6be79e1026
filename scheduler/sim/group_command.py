"""`--level group`: the order of each group, its promise to each job, and a simulation of it.

A policy forms the groups from a JOBS.yaml. `explain` names the bottleneck of each group's cycle.
`simulate` plays passes with phases that are shorter than the worst case. Never runs a real job.
"""

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

from rose.arguments import CommandParser
from rose.errors import ConfigError
from rose.scheduler.group.certificate import Certificate
from rose.scheduler.group.model import Group, Phase
from rose.scheduler.group.permits import Permit
from rose.scheduler.group.replay import PhaseTimes, replay
from rose.scheduler.runtime.command.gantt import add_cluster, bars, groups_of, text_lines, timetable_of


def simulate_groups(argv: Sequence[str]) -> int:
    """Plays each group's permits, and prints what its jobs got beside what they were promised."""
    parser = _parser("simulate", "Plays the groups of a file: every permit, in the certified order.")
    parser.add_argument(
        "--passes", type=int, default=50, help="passes through the order (default: %(default)s)"
    )
    parser.add_argument(
        "--least",
        type=float,
        default=0.5,
        help="shortest time of a phase, as a share of its worst case (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random numbers (default: %(default)s)"
    )
    arguments = parser.parse_args(list(argv))
    if arguments.passes < 2:
        parser.error(f"--passes {arguments.passes}: an iteration's length needs two starts; use at least 2")
    if not 0 < arguments.least <= 1:
        parser.error(f"--least {arguments.least:g}: expected more than 0 and at most 1")
    reports: list[dict[str, Any]] = []
    for group in _groups(arguments):
        found, chance = timetable_of(group), random.Random(arguments.seed)
        durations_s = {
            (s.job, s.kind): s_s for s, s_s in zip(found.order.steps, found.durations_s, strict=True)
        }

        def times_of(
            permit: Permit, _: int, durations_s: Any = durations_s, chance: Any = chance
        ) -> PhaseTimes:
            return PhaseTimes(
                done_s=durations_s[permit.job, Phase(permit.kind)] * chance.uniform(arguments.least, 1)
            )

        starts_s = replay(found, times_of, arguments.passes).starts_s
        reports.append({"group": group.name, "cycle_s": found.cycle_s, "jobs": _played(found, starts_s)})
    if arguments.json:
        print(json.dumps({"kind": "simulated", "groups": reports}, indent=2))
        return 0
    for report in reports:
        print(f"simulated, {report['group']}: certified cycle {report['cycle_s']:.1f} s")
        for name, job in report["jobs"].items():
            print(
                f"  {name}: an iteration every {job['mean_s']:.1f} s, longest {job['longest_s']:.1f} s; "
                f"promised every {job['promised_mean_s']:.1f} s, longest {job['promised_longest_s']:.1f} s"
            )
    return 0


def explain_groups(argv: Sequence[str]) -> int:
    """Prints each group's order, its timetable, its bottleneck and its promises."""
    arguments = _parser("explain", "Says why the jobs of each group run in their order.").parse_args(
        list(argv)
    )
    groups = _groups(arguments)
    if arguments.json:
        print(json.dumps([_explained(group) for group in groups], indent=2))
        return 0
    for group in groups:
        report = _explained(group)
        print("\n".join(text_lines(group)))
        print(f"  order: {', '.join(report['order'])}; {report['why']}")
        for name, job in report["jobs"].items():
            print(
                f"  {name}: promised {job['promised_s']:.1f} s, allowed {job['allowed_s']:.1f} s, "
                f"alone {job['alone_s']:.1f} s"
            )
    return 0


def _explained(group: Group) -> dict[str, Any]:
    found = timetable_of(group)
    busy_s = {node: sum(length_s for _, _, length_s in row) for node, row in bars(group, found).items()}
    busiest = max(busy_s, key=lambda node: busy_s[node])
    longest = max(found.bounds, key=lambda job: found.bounds[job].alone_s)
    if busy_s[busiest] >= found.cycle_s * (1 - 1e-6):
        why = f"{busiest} is never free, so no order is shorter"
    elif found.bounds[longest].alone_s >= found.cycle_s * (1 - 1e-6):
        why = f"{longest} alone takes as long, so no order is shorter"
    else:
        share = busy_s[busiest] / found.cycle_s
        why = f"{busiest} is busy {share:.0%} of the cycle, and phases wait for each other"
    return {
        "group": group.name,
        "order": list(found.order.iterations),
        "cycle_s": found.cycle_s,
        "why": why,
        "jobs": {
            name: {
                "promised_s": bound.longest_s,
                "allowed_s": bound.limit_s if math.isfinite(bound.limit_s) else None,
                "alone_s": bound.alone_s,
            }
            for name, bound in found.bounds.items()
        },
    }


def _played(found: Certificate, starts_s: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    played = {}
    for name, bound in found.bounds.items():
        gaps = [after_s - start_s for start_s, after_s in itertools.pairwise(starts_s[name])]
        played[name] = {
            "mean_s": statistics.fmean(gaps),
            "longest_s": max(gaps),
            "promised_mean_s": bound.mean_s,
            "promised_longest_s": bound.longest_s,
        }
    return played


def _groups(arguments: argparse.Namespace) -> list[Group]:
    """Places the file's jobs in order. Raises: ConfigError if it has none."""
    groups = groups_of(arguments.cluster, arguments.policy)
    if not groups:
        raise ConfigError(f"{arguments.cluster}: no jobs; list them under `jobs`")
    return groups


def _parser(command: str, description: str) -> CommandParser:
    name = f"rose sched {command} --level group"
    parser = CommandParser(name, description, f"{name} jobs.yaml")
    add_cluster(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser
