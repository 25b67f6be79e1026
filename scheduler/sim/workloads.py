"""What arrives: jobs of WEAVE's Table 6 at the times of a trace.

Owns the trace's CSV (arrival_s, duration_s, num_gpus, and where wanted priority and team), its generator, and
Table 6. The same seed gives the same jobs.
"""

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rose.errors import ConfigError
from rose.scheduler.group.model import Job, SloKind


class Workload(StrEnum):
    """Rows of WEAVE Table 6."""

    BALANCED = "balanced"
    ROLLOUT_HEAVY = "rollout-heavy"
    TRAIN_HEAVY = "train-heavy"
    MIXED = "mixed"


TABLE_6: dict[Workload, tuple[tuple[tuple[float, float], tuple[float, float]], ...]] = {
    Workload.BALANCED: (((50, 100), (50, 100)), ((100, 200), (100, 200)), ((200, 300), (200, 300))),
    Workload.ROLLOUT_HEAVY: (((100, 200), (25, 50)), ((200, 400), (50, 100)), ((400, 600), (100, 200))),
    Workload.TRAIN_HEAVY: (((25, 50), (100, 200)), ((50, 100), (200, 400)), ((100, 200), (400, 600))),
}
"""Rollout and training seconds, uniform, of small, medium and large jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A line of a trace."""

    arrival_s: float
    duration_s: float
    priority: int = 0
    team: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job and when it comes; `work_s` are its solo seconds."""

    job: Job
    arrival_s: float
    work_s: float
    priority: int = 0
    team: str | None = None


def read_trace(path: Path) -> list[Arrival]:
    """Reads a trace in the order of arrival. Raises: ConfigError with the number of a wrong line."""
    arrivals = []
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            wanted = {"arrival_s", "duration_s"}
            if missing := wanted - set(reader.fieldnames or ()):
                raise ConfigError(
                    f"{path}: no column {', '.join(sorted(missing))}; a trace has arrival_s, duration_s and, "
                    "if wanted, priority and team"
                )
            for row in reader:
                arrivals.append(_arrival(path, reader.line_num, row))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); check the path") from error
    if not arrivals:
        raise ConfigError(f"{path}: no jobs")
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


def _arrival(path: Path, line: int, row: dict[str, str]) -> Arrival:
    try:
        arrival = Arrival(
            arrival_s=float(row["arrival_s"]),
            duration_s=float(row["duration_s"]),
            priority=int(row.get("priority") or 0),
            team=row.get("team") or None,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: line {line}: {error}") from error
    if not (0 <= arrival.arrival_s < math.inf and 0 < arrival.duration_s < math.inf):
        raise ConfigError(f"{path}: line {line}: arrival_s >= 0 and duration_s > 0, got {row}")
    return arrival


def generate_trace(seed: int, num_jobs: int = 300) -> list[Arrival]:
    """Arrivals alone or in bursts, lognormal durations: the segment's 1.9 h between jobs and 13.9 h a job."""
    chance = random.Random(seed)
    arrivals, now_s = [], 0.0
    for _ in range(num_jobs):
        # Half of the jobs come within minutes of another, as in Philly.
        now_s += chance.expovariate(1 / 300) if chance.random() < 0.5 else chance.expovariate(1 / 13_300)
        duration_s = min(362_000.0, max(1200.0, chance.lognormvariate(10.1, 1.15)))
        arrivals.append(Arrival(arrival_s=now_s, duration_s=duration_s))
    return arrivals


def submissions(
    trace: Sequence[Arrival],
    workload: Workload,
    seed: int,
    *,
    slo: tuple[float, float] = (1.0, 2.0),
    slo_kind: SloKind = SloKind.ITERATION,
    nodes_by_size: tuple[int, int, int] = (1, 1, 1),
) -> list[Submission]:
    """Returns a job of the workload for each line of a trace. `slo`: uniform between. `nodes_by_size`: of
    either pool, for small, medium and large jobs."""
    chance = random.Random(seed)
    found = []
    for number, arrival in enumerate(trace):
        kind = chance.choice(list(TABLE_6)) if workload is Workload.MIXED else workload
        size = chance.randrange(3)
        rollout, train = TABLE_6[kind][size]
        job = Job(
            name=f"j{number}",
            rollout_s=chance.uniform(*rollout),
            train_s=chance.uniform(*train),
            num_rollout_nodes=nodes_by_size[size],
            num_train_nodes=nodes_by_size[size],
            slo=chance.uniform(*slo),
            slo_kind=slo_kind,
        )
        found.append(
            Submission(
                job=job,
                arrival_s=arrival.arrival_s,
                work_s=arrival.duration_s,
                priority=arrival.priority,
                team=arrival.team,
            )
        )
    return found
