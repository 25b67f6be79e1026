"""All ranks of a job share one permit, each gets its own state back, and checkpoints break no certificate.

Jobs of 2 and of 4 ranks alternate on the nodes of one group, under the cluster scheduler itself on a
simulated clock. Ranks are killed at random, some so that only the scheduler can notice, and so is the
scheduler. Between two trainings each rank's state is in a real host cache.
  rank_exclusion_violations  a rank ran on nodes of another job, or without its job's permit
  rank_copy_errors           a rank got back another state than it offloaded
  outside_phase_violations   two jobs of 100 s + 100 s and an SLO of 1.15; one saves a checkpoint of 5 to 60%
                             of an iteration after each training. Iterations longer than the SLO allows, with
                             the checkpoint in the job's file, and without it after drift was certified

    python benchmarks/bench_ranks.py --json ranks.json
"""

import argparse
import itertools
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from lib.harness import run_benchmark
from sim.ranks.jobs import RankedJobs

from rose.measure.figures import Figure
from rose.scheduler.runtime.job.cache import HostCache

KILL_EVERY_S = 40.0
PHASE_S = 3.0
SHARES = (0.05, 0.1, 0.2, 0.4, 0.6)
LONG_S = 100.0
SLO = 1.15
NUM_TO_DRIFT = 6
"""Iterations until three checkpoints that no file declares were seen and certified."""


class RealCopies:
    """A host cache for each rank, with a different value for each offload."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._number = itertools.count(1)
        self._kept: dict[tuple[str, int], int] = {}
        self.num_loads = 0
        self.errors: list[str] = []

    def load(self, job: str, rank: int) -> None:
        arrays, expected = self._cache(job, rank).arrays(), self._kept.get((job, rank))
        found = int(arrays["w"][0]) if arrays else None
        self.num_loads += 1
        if found != expected:
            self.errors.append(f"rank {rank} of {job} got {found}, it offloaded {expected}")

    def offload(self, job: str, rank: int) -> None:
        self._kept[job, rank] = next(self._number)
        self._cache(job, rank).keep({"w": np.full(8, self._kept[job, rank])})

    def forget(self, job: str) -> None:
        shutil.rmtree(self._root / job, ignore_errors=True)
        self._kept = {key: value for key, value in self._kept.items() if key[0] != job}

    def _cache(self, job: str, rank: int) -> HostCache:
        return HostCache(self._root / job / "train", 1 << 20, f"train of job {job}", rank)


def spec(name: str, phase_s: float, **fields: Any) -> dict[str, Any]:
    phases = {"rollout": {"seconds": phase_s}, "train": {"seconds": phase_s}}
    base = {"name": name, "command": ["x"], "max_tokens": 1024, "iterations": 10**6, "slo": 100.0}
    return {**base, "phases": phases, "group": "main", "max_restarts": 10**6, **fields}


def measure(args: argparse.Namespace) -> list[Figure]:
    figures = []
    for num_ranks in (2, 4):
        figures += _killed(num_ranks, 1000 if args.quick else 10_000, args.seed)
    num_iterations = 40 if args.quick else 400
    for is_declared, share in itertools.product((True, False), SHARES):
        is_late = late(share, is_declared, num_iterations, args.seed)
        case = f"{share:.0%}, {'declared' if is_declared else 'found as drift'}"
        first = 0 if is_declared else NUM_TO_DRIFT
        beside: dict[str, float | None] = {} if is_declared else {"before it is found": sum(is_late[:first])}
        num_late = sum(is_late[first:])
        figures.append(_figure(f"outside_phase_violations[{case}]", num_late, "iterations", beside))
    return figures


def _figure(name: str, value: int, unit: str, peers: dict[str, float | None] | None = None) -> Figure:
    return Figure(name=name, value=value, unit=unit, target="<= 0", kind="simulated", peers=peers or {})


def _killed(num_ranks: int, num_phases: int, seed: int) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="rose-bench-ranks-") as folder:
        copies = RealCopies(Path(folder))
        specs = [spec(name, PHASE_S, num_ranks=num_ranks) for name in "abc"]
        jobs = RankedJobs(specs, seed, shortest=0.3, copies=copies)
        seen = jobs.run(num_phases=num_phases, kill_every_s=KILL_EVERY_S)
    for problem in [*seen.overlaps, *copies.errors][:10]:
        print(problem, file=sys.stderr)
    beside: dict[str, float | None] = {
        "phases": seen.num_phases,
        "loads": copies.num_loads,
        **{f"kills of a {how}": number for how, number in sorted(seen.kills.items())},
    }
    case = f"[{num_ranks} ranks]"
    return [
        _figure(f"rank_exclusion_violations{case}", len(seen.overlaps), "ranks", beside),
        _figure(f"rank_copy_errors{case}", len(copies.errors), "loads"),
    ]


def late(share: float, is_declared: bool, num_iterations: int, seed: int) -> list[int]:
    """Returns for each iteration how many of the two jobs exceeded their SLO in it."""
    checkpoint_s = share * 2 * LONG_S
    specs = [spec(name, LONG_S, slo=SLO, group=None) for name in "ab"]
    if is_declared:
        specs[0] |= {"outside": {"after_train_s": checkpoint_s}}
    jobs = RankedJobs(specs, seed, gaps_s={"a": checkpoint_s})
    starts_s = jobs.run(num_phases=4 * num_iterations).starts_s
    limits_s = {"a": SLO * (2 * LONG_S + checkpoint_s), "b": SLO * 2 * LONG_S}
    exceeded = [
        [end_s - start_s > limits_s[name] + 1e-3 for start_s, end_s in itertools.pairwise(times)]
        for name, times in sorted(starts_s.items())
    ]
    return [a + b for a, b in zip(*exceeded, strict=False)]


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
