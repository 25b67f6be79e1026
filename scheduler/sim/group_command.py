"""`--level group`: the order of each group, its promise to each job, and a simulation of it.

A policy forms the groups from a CLUSTER.yaml. `explain` names the bottleneck of each group's cycle.
`simulate` plays passes with phases that are shorter than the worst case. Never runs a real job.
"""

import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rose.arguments import CommandParser
from rose.config import load_yaml
from rose.errors import ConfigError
from rose.scheduler.cluster.choice import POLICIES
from rose.scheduler.cluster.groups import Cluster, Rearrangement
from rose.scheduler.cluster.spec import ClusterSpec
from rose.scheduler.group.certificate import Certificate
from rose.scheduler.group.model import Group, Phase
from rose.scheduler.group.permits import Permit
from rose.scheduler.group.replay import PhaseTimes, replay
from rose.scheduler.runtime.command.gantt import bars, text_lines, timetable_of


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
        help="the shortest a phase takes, over its worst case (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random numbers (default: %(default)s)"
    )
    arguments = parser.parse_args(list(argv))
    if arguments.passes < 2:
        parser.error(f"--passes {arguments.passes}: an iteration's length needs two starts; want at least 2")
    if not 0 < arguments.least <= 1:
        parser.error(f"--least {arguments.least:g}: want more than 0, at most 1")
    reports: list[dict[str, Any]] = []
    for group in _groups(arguments.cluster, arguments.policy):
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
    groups = list(_groups(arguments.cluster, arguments.policy))
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


def _groups(path: Path, policy_name: str) -> Iterator[Group]:
    """Places the file's jobs in order. Raises: ConfigError if it has none."""
    spec = load_yaml(path, ClusterSpec)
    cluster, policy = Cluster(spec.pools.to_pools()), POLICIES[policy_name](0)
    for job in spec.to_jobs():
        cluster.submit(job, 0.0)
        cluster.apply(Rearrangement(groups=(policy.place(cluster, job, 0.0).group,)), 0.0)
    if not cluster.groups:
        raise ConfigError(f"{path}: no jobs; list them under `jobs`")
    yield from cluster.groups.values()


def _parser(command: str, description: str) -> CommandParser:
    name = f"rose sched {command} --level group"
    parser = CommandParser(name, description, f"{name} cluster.yaml")
    parser.add_argument(
        "cluster",
        type=Path,
        metavar="CLUSTER.yaml",
        help="a file with pools and jobs, as for rose sched explain",
    )
    parser.add_argument(
        "--policy",
        choices=sorted(set(POLICIES) - {"exact"}),
        default="lifetime",
        help="the policy that places jobs (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser
