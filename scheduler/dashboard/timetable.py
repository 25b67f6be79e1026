"""A running group's timetable, made again from what the scheduler says of its jobs.

Owns the bars of the certified cycle, the pools' idle shares in it, and what each job is promised. It computes
the same certificate that admitted the jobs, for their present order. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rose.scheduler.group.certificate import CertificateError, certify
from rose.scheduler.group.model import Group, Job, Member, SloKind
from rose.scheduler.group.order import TRAIN_POOL, own_order
from rose.scheduler.runtime.command.gantt import Bar, bars, node_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """One group's cycle at worst-case times. `problem`: why there is none."""

    cycle_s: float = 0.0
    bars: Mapping[str, tuple[Bar, ...]] = field(default_factory=dict)
    """The bars of each node; ``train`` is all training nodes, which work for one job at a time."""
    idle_share: Mapping[str, float] = field(default_factory=dict)
    """For each pool, the share of its nodes' time that no phase uses."""
    promised_s: Mapping[str, float] = field(default_factory=dict)
    """The iteration that a job's SLO is held against: its longest, or the mean with a lifetime SLO."""
    problem: str | None = None


def job_of(facts: Mapping[str, Any]) -> Job:
    """The job as the scheduler has placed it."""
    return Job(
        name=facts["name"],
        rollout_s=facts["rollout_s"],
        train_s=facts["train_s"],
        after_rollout_s=facts["after_rollout_s"],
        after_train_s=facts["after_train_s"],
        num_rollout_nodes=facts["num_rollout_nodes"],
        num_train_nodes=facts["num_train_nodes"],
        slo=facts["slo"],
        slo_kind=SloKind(facts["slo_kind"]),
    )


def timetable(name: str, facts: Mapping[str, Any], jobs: Mapping[str, Job]) -> Timetable:
    """Returns the timetable of the group with these facts."""
    iterations = tuple(job for job in facts["order"] if job in facts["jobs"])
    there = tuple(dict.fromkeys(iterations))
    if not there:
        return Timetable()
    group = Group(
        name=name,
        num_rollout_nodes=facts["num_rollout_nodes"],
        num_train_nodes=facts["num_train_nodes"],
        members=tuple(Member(job=jobs[job], rollout_nodes=tuple(facts["jobs"][job])) for job in there),
        iterations=iterations,
    )
    limits_s = {job: limit_s for job, limit_s in facts["limits_s"].items() if job in there}
    return _timetable(group, tuple(limits_s.items()))


@lru_cache(maxsize=4096)
def _timetable(group: Group, limits_s: tuple[tuple[str, float], ...]) -> Timetable:
    """Kept, for a group seldom changes between two looks."""
    try:
        found = certify(group, own_order(group), dict(limits_s))
    except CertificateError as error:  # a job that left keeps an empty place; without it others wait
        return Timetable(problem=str(error))
    rows = bars(group, found)
    return Timetable(
        cycle_s=found.cycle_s,
        bars={row: tuple(sorted(each, key=lambda bar: bar[1])) for row, each in rows.items()},
        idle_share={
            "rollout": _idle(found.cycle_s, [rows[node_name(n)] for n in range(group.num_rollout_nodes)]),
            "train": _idle(found.cycle_s, [rows[node_name(TRAIN_POOL)]]),
        },
        promised_s={
            job: bound.longest_s if bound.slo_kind is SloKind.ITERATION else bound.mean_s
            for job, bound in found.bounds.items()
        },
    )


def _idle(cycle_s: float, rows: Sequence[Sequence[Bar]]) -> float:
    shares = [1.0 - sum(length_s for _, _, length_s in row) / cycle_s for row in rows]
    return max(0.0, sum(shares) / len(shares))
