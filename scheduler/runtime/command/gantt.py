"""`rose sched gantt JOBS.yaml`: draws when each job runs on which node, as text or as a picture.

It shows the timetable that certifies each group, at worst-case times, and not what really ran.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rose.arguments import CommandParser
from rose.config import load_yaml
from rose.scheduler.cluster.choice import POLICIES
from rose.scheduler.cluster.groups import Cluster, Rearrangement
from rose.scheduler.cluster.spec import DEFAULT_POLICY, ClusterSpec
from rose.scheduler.group.certificate import Certificate, CertificateError, certify
from rose.scheduler.group.model import Group
from rose.scheduler.group.order import TRAIN_POOL, own_order

_WIDTH = 72
Bar = tuple[str, float, float]
"""Job, start, length in seconds."""


def main(argv: Sequence[str]) -> int:
    """Places the file's jobs in order, and draws every group's timetable."""
    parser = CommandParser(
        "rose sched gantt",
        "Places the jobs of a file in order, and draws when each runs where, at worst-case times.",
        "rose sched gantt jobs.yaml -o groups.png",
    )
    add_cluster(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="PNG", help="draw a picture instead of text")
    arguments = parser.parse_args(list(argv))
    groups = groups_of(arguments.cluster, arguments.policy)
    if arguments.output is not None:
        _draw(groups, arguments.output)
    else:
        for group in groups:
            print("\n".join(text_lines(group)))
    return 0


def add_cluster(parser: CommandParser) -> None:
    """Adds the arguments that ``groups_of`` needs."""
    parser.add_argument(
        "cluster",
        type=Path,
        metavar="JOBS.yaml",
        help="a file with pools and jobs, as rose sched explain --help shows it",
    )
    parser.add_argument(
        "--policy",
        choices=sorted(set(POLICIES) - {"exact"}),
        default=DEFAULT_POLICY,
        metavar="POLICY",
        help="the policy that places jobs: %(choices)s (default: %(default)s)",
    )


def groups_of(path: Path, policy_name: str) -> list[Group]:
    """Places the file's jobs in order, and returns the groups."""
    spec = load_yaml(path, ClusterSpec)
    cluster, policy = Cluster(spec.pools.to_pools()), POLICIES[policy_name](0)
    for job in spec.to_jobs():
        cluster.submit(job, 0.0)
        cluster.apply(Rearrangement(groups=(policy.place(cluster, job, 0.0).group,)), 0.0)
    return list(cluster.groups.values())


def timetable_of(group: Group) -> Certificate:
    """Returns the timetable that certifies the group; the order's shortest one if SLOs are not kept."""
    order = own_order(group)
    try:
        return certify(group, order)
    except CertificateError:  # as the policies random and greedy make groups
        return certify(group, order, dict.fromkeys(order.steps_of_job, math.inf))


def bars(group: Group, found: Certificate) -> dict[str, list[Bar]]:
    """Returns what runs on each node during one pass, from 0. A phase that wraps has two bars."""
    rows: dict[str, list[Bar]] = {
        node_name(node): [] for node in (*range(group.num_rollout_nodes), TRAIN_POOL)
    }
    for step, start_s, length_s in zip(found.order.steps, found.starts_s, found.durations_s, strict=True):
        for resource in step.resources:
            rows[node_name(resource)] += repeated_bars(
                step.job, start_s, length_s, found.cycle_s, found.cycle_s
            )
    return rows


def node_name(resource: int) -> str:
    """Returns the node's name in `rose sched drain`."""
    return "train" if resource == TRAIN_POOL else f"rollout-{resource}"


def repeated_bars(
    name: str, at_s: float, length_s: float, period_s: float, horizon_s: float
) -> Iterator[Bar]:
    """Yields a phase's bars within the horizon; it repeats after each period."""
    start_s = at_s % period_s - period_s
    while start_s < horizon_s:
        first_s, last_s = max(0.0, start_s), min(horizon_s, start_s + length_s)
        if last_s > first_s:
            yield name, first_s, last_s - first_s
        start_s += period_s


def text_lines(group: Group) -> list[str]:
    """Returns a line for each node: a letter where a job runs, a dot where nobody does."""
    letters = {member.job.name: chr(ord("A") + k) for k, member in enumerate(group.members)}
    found = timetable_of(group)
    lines = [f"{group.name}: {found.cycle_s:.0f} s"]
    for row, each in bars(group, found).items():
        cells = ["."] * _WIDTH
        for name, start_s, length_s in each:
            first = math.floor(start_s / found.cycle_s * _WIDTH)
            last = max(first + 1, math.floor((start_s + length_s) / found.cycle_s * _WIDTH))
            cells[first:last] = letters[name] * (min(last, _WIDTH) - first)
        lines.append(f"  {row:<10} {''.join(cells)}")
    for name, letter in letters.items():
        lines.append(f"  {letter} {name}, every {found.bounds[name].mean_s:.1f} s")
    return lines


def _draw(groups: Sequence[Group], path: Path) -> None:
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(10, 1 + 2 * len(groups)), layout="constrained")
    for axis, group in zip(figure.subplots(len(groups), squeeze=False)[:, 0], groups, strict=True):
        colors = {member.job.name: f"C{k}" for k, member in enumerate(group.members)}
        rows = bars(group, timetable_of(group))
        for height, found in enumerate(rows.values()):
            for name, start_s, length_s in found:
                axis.barh(height, length_s, left=start_s, color=colors[name])
        for name, color in colors.items():
            axis.barh(0, 0, color=color, label=name)
        axis.set_yticks(range(len(rows)), list(rows))
        axis.invert_yaxis()
        axis.set_title(group.name, loc="left")
        axis.set_xlabel("seconds, worst case")
        axis.legend(loc="upper right", fontsize="small")
    figure.savefig(path)
