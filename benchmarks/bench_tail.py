"""Moving a rollout's tail aside never slows a group, and speeds up a rollout-bound one by 1.2.

Simulated, within one node: two jobs share one rollout node of eight GPUs and a training node, round-robin.
Their permits, order and pace are the shipped objects; what a phase takes comes from a model: lognormal
response lengths cut at the token limit, and decode steps that grow with the batch (constants below: chosen
for the shape of WEAVE Table 3's jobs on H20s, not fitted). The policy sees the lengths of four past
iterations, never the ones to come. The next job runs on what the tail leaves until it has finished, even if
the tail ends earlier, so simulated gains are on the low side. A move that could break the certificate is not
made.

  tail_gain[PAIR]         time of the same iterations without moves over with moves, `choose_thresholds`; the
                          median over the seeds. Beside it the fixed 80% of WEAVE §4.3, and the choice for
                          jobs with a lifetime SLO, who are not held back (pace)
  tail_gain[sweep]        the smallest over five pairs, training from 0.2 to 1.2 of rollout, and seeds
  tail_gain[least]        the smallest of all
  certificate_violations  iterations or timetables worse than certified, in all these runs

Measured, on whole nodes, as the runtime moves tails: two jobs' processes under `rose sched serve`
(lib/cluster/tails.py). Lengths and speeds come from the same model, and phases sleep for what it says, at
1/50; reports, choices, permits and moves are real. Each seed is run without and with moves, one after the
other.

  tail_gain[measured: GROUP]  as above; the first iteration, of which no past is known, is left out

    python benchmarks/bench_tail.py --json tail.json
"""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lib.cluster.tails import RealGroup, measured_gain
from lib.harness import run_benchmark

from rose.measure.figures import Figure
from rose.scheduler.group.certificate import certify
from rose.scheduler.group.model import Group, Job, Member, Phase, SloKind
from rose.scheduler.group.order import round_robin
from rose.scheduler.group.permits import Permit
from rose.scheduler.group.replay import PhaseTimes, replay
from rose.scheduler.group.tail import (
    MovedTail,
    RolloutSpeed,
    TailJob,
    choose_thresholds,
    has_room,
    play_rollout,
)

SLO = 2.0
NUM_PAST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A type of job: its lengths, its speed, and training as a share of the mean rollout alone."""

    median_tokens: float
    spread: float
    max_tokens: int
    step_s: float
    num_requests: int = 256

    def lengths(self, rng: random.Random) -> list[int]:
        drawn = (self.median_tokens * rng.lognormvariate(0, self.spread) for _ in range(self.num_requests))
        return [max(1, min(self.max_tokens, round(each))) for each in drawn]

    @property
    def speed(self) -> RolloutSpeed:
        return RolloutSpeed(
            num_workers=8,
            step_s=self.step_s,
            request_s=self.step_s / 200,
            prompt_tokens=512,
            prefill_tokens_per_s=16_000 * 0.02 / self.step_s,
            max_tokens=self.max_tokens,
        )


B7_8K = _Kind(median_tokens=1500, spread=0.9, max_tokens=8192, step_s=0.018)
B14_8K = _Kind(median_tokens=2000, spread=0.8, max_tokens=8192, step_s=0.026)
B14_16K = _Kind(median_tokens=2500, spread=1.0, max_tokens=16384, step_s=0.026, num_requests=64)
PAIRS = {
    "7B-8k + 7B-8k, rollout-bound": ((B7_8K, 0.2), (B7_8K, 0.2)),
    "14B-8k + 14B-8k, rollout-bound": ((B14_8K, 0.2), (B14_8K, 0.2)),
    "14B-16k + 14B-16k, rollout-bound": ((B14_16K, 0.2), (B14_16K, 0.2)),
    "7B-8k + 14B-8k, unlike": ((B7_8K, 0.5), (B14_8K, 0.5)),
    "7B-8k + 7B-8k, training = rollout": ((B7_8K, 1.0), (B7_8K, 1.0)),
    "14B-8k + 14B-8k, training = rollout": ((B14_8K, 1.0), (B14_8K, 1.0)),
    "7B-8k + 14B-8k, training-bound": ((B7_8K, 1.5), (B14_8K, 1.5)),
}
SWEPT_KINDS = ((B7_8K, B7_8K), (B14_8K, B14_8K), (B14_16K, B14_16K), (B7_8K, B14_8K), (B14_8K, B14_16K))
SWEPT_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
SWEPT_SLO = 3.0
"""Unlike jobs with little training meet no tighter one."""
NEVER_LOSES = ">= 1.0"
ROLLOUT_BOUND = ">= 1.2"
REAL_GROUPS = (
    RealGroup(
        title="rollout-bound, each a node of its own and one for both",
        nodes=((0, 1), (1, 2)),
        share=0.2,
        target=ROLLOUT_BOUND,
    ),
    RealGroup(
        title="rollout-bound, one within the other's nodes",
        nodes=((0, 1), (1,)),
        share=0.2,
        target=ROLLOUT_BOUND,
    ),
    RealGroup(title="training = rollout", nodes=((0, 1), (1,)), share=1.0, target=NEVER_LOSES),
    RealGroup(title="training-bound", nodes=((0, 1), (1,)), share=1.2, target=NEVER_LOSES),
)


class _Pair:
    """One pair with one seed: its group, and the lengths of every iteration, the same for every policy."""

    def __init__(
        self, pair: Sequence[tuple[_Kind, float]], seed: int, num_passes: int, slo: float = SLO
    ) -> None:
        rng = random.Random(seed)
        self.num_passes = num_passes
        self.slo = slo
        self.kinds = dict(zip("ab", (kind for kind, _ in pair), strict=True))
        past = {name: [kind.lengths(rng) for _ in range(NUM_PAST)] for name, kind in self.kinds.items()}
        self.lengths = {
            name: [kind.lengths(rng) for _ in range(num_passes)] for name, kind in self.kinds.items()
        }
        jobs = []
        for name, share in zip("ab", (share for _, share in pair), strict=True):
            speed = self.kinds[name].speed
            rollout_s = statistics.fmean(play_rollout(each, speed, None).done_s for each in past[name])
            jobs.append(TailJob(name=name, speed=speed, past=past[name], train_s=rollout_s * share))
        self.jobs = {job.name: job for job in jobs}
        self.group = Group(
            name="pair",
            num_train_nodes=1,
            num_rollout_nodes=1,
            members=tuple(Member(job=self._profiled(job), rollout_nodes=(0,)) for job in jobs),
        )

    def _profiled(self, job: TailJob) -> Job:
        rollout_s = job.speed.worst_s(self.kinds[job.name].num_requests)
        return Job(name=job.name, rollout_s=rollout_s, train_s=job.train_s, slo=self.slo)

    def run(
        self, thresholds: dict[str, float | None], slo_kind: SloKind = SloKind.ITERATION
    ) -> tuple[float, int]:
        """Returns the seconds that all iterations take, and violations of the certificate."""
        members = tuple(
            replace(member, job=replace(member.job, slo_kind=slo_kind)) for member in self.group.members
        )
        group = replace(self.group, members=members)
        certificate = certify(group, round_robin(group))
        history = replay(certificate, _Model(self, thresholds).times, self.num_passes)
        return max(ends[-1] for ends in history.ends_s.values()), len(history.violations(certificate))


class _Model:
    """Says what phases take, with the tails that run meanwhile."""

    def __init__(self, pair: _Pair, thresholds: dict[str, float | None]) -> None:
        self._pair = pair
        self._thresholds = thresholds
        self._tails: dict[str, MovedTail] = {}

    def times(self, permit: Permit, iteration: int) -> PhaseTimes:
        if permit.kind is Phase.TRAIN:
            return PhaseTimes(done_s=self._pair.jobs[permit.job].train_s)
        job = self._pair.jobs[permit.job]
        lengths = self._pair.lengths[permit.job][iteration]
        workers = job.speed.num_workers - sum(self._tails[guest].num_workers for guest in permit.guests)
        tail = play_rollout(lengths, job.speed, self._thresholds[permit.job], workers)
        others = [other for other in self._pair.jobs.values() if other is not job]
        if not all(has_room(other.speed, len(other.past[0]), tail) for other in others):
            tail = play_rollout(lengths, job.speed, None, workers)
        self._tails[permit.job] = tail
        return PhaseTimes(done_s=tail.done_s, freed_s=tail.freed_s if tail.num_workers else None)


def measure(args: argparse.Namespace) -> list[Figure]:
    figures = _simulated(args) if args.only in (None, "simulated") else []
    num_repeats = args.repeats if args.repeats is not None else (1 if args.quick else 3)
    seeds = range(args.seed, args.seed + num_repeats)
    for number, group in enumerate(REAL_GROUPS):
        if args.only in (None, "measured", f"measured-{number}"):
            figures.append(measured_gain(group, B7_8K.speed, B7_8K.lengths, seeds, 3 if args.quick else 5))
    return figures


def _simulated(args: argparse.Namespace) -> list[Figure]:
    num_seeds, num_passes = (3, 8) if args.quick else (20, 20)
    figures = []
    gains: list[float] = []
    violations = 0
    for title, pair in PAIRS.items():
        chosen, fixed, lifetime = [], [], []
        for seed in range(args.seed, args.seed + num_seeds):
            drawn = _Pair(pair, seed, num_passes)
            off_s, off_broken = drawn.run(dict.fromkeys(drawn.jobs))
            thresholds = choose_thresholds(list(drawn.jobs.values()))
            chosen_s, chosen_broken = drawn.run(thresholds)
            free_s, free_broken = drawn.run(thresholds, SloKind.LIFETIME)
            fixed_s, fixed_broken = drawn.run(dict.fromkeys(drawn.jobs, 0.8))
            chosen.append(off_s / chosen_s)
            fixed.append(off_s / fixed_s)
            free_off_s, _ = drawn.run(dict.fromkeys(drawn.jobs), SloKind.LIFETIME)
            lifetime.append(free_off_s / free_s)
            violations += off_broken + chosen_broken + fixed_broken + free_broken
        gains += [*chosen, *lifetime]
        figures.append(
            Figure(
                name=f"tail_gain[{title}]",
                value=statistics.median(chosen),
                unit="x",
                target=ROLLOUT_BOUND if "rollout-bound" in title else NEVER_LOSES,
                kind="simulated",
                peers={
                    "fixed 80%": statistics.median(fixed),
                    "fixed 80%, least": min(fixed),
                    "lifetime SLO": statistics.median(lifetime),
                    "lifetime SLO, least": min(lifetime),
                },
                spread=(min(chosen), max(chosen)),
            )
        )
    swept = [_swept(kinds, share, args) for kinds in SWEPT_KINDS for share in SWEPT_SHARES]
    broken = Figure(
        name="certificate_violations", value=violations, unit="count", target="<= 0", kind="simulated"
    )
    figures += [_least("tail_gain[sweep]", swept), _least("tail_gain[least]", [*gains, *swept])]
    return [*figures, broken]


def _swept(kinds: tuple[_Kind, _Kind], share: float, args: argparse.Namespace) -> float:
    """The least gain over some seeds, other than those above."""
    gains = []
    for seed in range(1_000 + args.seed, 1_000 + args.seed + (1 if args.quick else 4)):
        drawn = _Pair([(kind, share) for kind in kinds], seed, 10, SWEPT_SLO)
        off_s, _ = drawn.run(dict.fromkeys(drawn.jobs))
        chosen_s, _ = drawn.run(choose_thresholds(list(drawn.jobs.values())))
        gains.append(off_s / chosen_s)
    return min(gains)


def _least(name: str, gains: Sequence[float]) -> Figure:
    return Figure(name=name, value=min(gains), unit="x", target=NEVER_LOSES, kind="simulated")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    numbers = [f"measured-{number}" for number in range(len(REAL_GROUPS))]
    parser.add_argument("--only", choices=("simulated", "measured", *numbers))
    parser.add_argument("--repeats", type=int, help="measured pairs of runs, each with a seed of its own")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, measure, _add_arguments))
