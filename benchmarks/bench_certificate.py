"""No group ever runs worse than its certificate says, and jobs that join find mostly the best order.

Random groups have up to 5 jobs on any of up to 3 rollout nodes, in any order; half of the orders have one job
several times in a pass. SLOs, some of the mean, are as tight as the order can promise or a third looser. The
groups are certified, then replayed through the shipped permit book and pace, with phases of any length up to
their worst case. In three out of ten groups a job leaves on the way. The figures are counts, not times of a
real system:

  certificate_violations        groups with an iteration longer, a phase later or a mean worse than certified
  best_order[multi-node]        share of groups of 2 to 5 jobs, which join one after the other, each at its
                                best place, whose round-robin certificate is as short as the shortest of
                                all timetables with one iteration per job (CP-SAT)
  best_order[single-node]       the same with every job on one rollout node
  bound_missed[multi-node]      share of those in which that shortest is longer than Theorem 1's bound
  fifo_over_certificate[CASE]   share of those groups in which nodes that serve first come, first served, give
                                some job a longer iteration than that certificate; beside it the largest ratio
  certify_ms, search_ms         measured: one certificate; an order for one group, multi-rate included

    python benchmarks/bench_certificate.py --json certificate.json
    python benchmarks/bench_certificate.py --only replay --first 20000 --groups 20000
"""

import argparse
import importlib.util
import random
import statistics
import sys
import time

from lib.harness import median_figure, run_benchmark
from sim.group.fifo import longest_iteration_s
from sim.group.scenario import group_of, joined, random_group, random_order, tightened

from rose.errors import ConfigError, install_hint
from rose.measure.figures import Figure
from rose.scheduler.group.certificate import certify, limit_s
from rose.scheduler.group.cycle import round_robin_s
from rose.scheduler.group.model import Group
from rose.scheduler.group.order import TRAIN_POOL, round_robin
from rose.scheduler.group.permits import Permit
from rose.scheduler.group.replay import PhaseTimes, replay
from rose.scheduler.group.search import ordered

NUM_GROUPS = {True: 1_000, False: 100_000}
NUM_EXACT = {True: 100, False: 2_000}
NUM_TIMED = 200
NUM_PASSES = 3
EXACT_LIMIT_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first", type=int, default=0, help="seed of the first group")
    parser.add_argument("--groups", type=int, help="how many groups to replay")
    parser.add_argument("--only", choices=("replay", "exact", "times"), help="one part of the figures")


def measure(args: argparse.Namespace) -> list[Figure]:
    parts = {"replay": _replays, "exact": _exact, "times": _times}
    return [figure for name, part in parts.items() if args.only in (None, name) for figure in part(args)]


def _replays(args: argparse.Namespace) -> list[Figure]:
    num_groups = args.groups if args.groups is not None else NUM_GROUPS[args.quick]
    if num_groups < 1:
        raise ConfigError(f"--groups {num_groups}: at least one")
    first = args.first + args.seed * NUM_GROUPS[False]
    broken = sum(_is_broken(seed) for seed in range(first, first + num_groups))
    unit = f"of {num_groups} groups"
    return [Figure(name="certificate_violations", value=broken, unit=unit, target="<= 0", kind="simulated")]


def _is_broken(seed: int) -> bool:
    rng = random.Random(seed)
    group = random_group(rng)
    certificate = tightened(group, random_order(group, rng), rng)
    certificate.check()
    num_steps = len(certificate.order.steps)
    all_worst = rng.random() < 0.1

    def times_of(permit: Permit, iteration: int) -> PhaseTimes:
        worst_s = certificate.durations_s[permit.step_number % num_steps]
        return PhaseTimes(
            done_s=worst_s if all_worst else worst_s * rng.choice((0.0, rng.random(), 1.0, 1.0))
        )

    leaver = rng.choice(group.members).job.name
    leaves_s = {leaver: rng.random() * NUM_PASSES * certificate.cycle_s} if rng.random() < 0.3 else {}
    history = replay(certificate, times_of, NUM_PASSES, leaves_s=leaves_s)
    violations = history.violations(certificate)
    stuck = [
        name
        for name, bound in certificate.bounds.items()
        if name not in leaves_s and len(history.ends_s[name]) < NUM_PASSES * bound.num_iterations
    ]
    for text in (*violations, *(f"job {name} is stuck" for name in stuck)):
        print(f"seed {seed}: {text}", file=sys.stderr)
    return bool(violations or stuck)


def _exact(args: argparse.Namespace) -> list[Figure]:
    if importlib.util.find_spec("ortools") is None:
        print(f"best_order: not measured, it needs ortools; {install_hint('cluster')}", file=sys.stderr)
        return [Figure(name="best_order[multi-node]", value=None, unit="share", kind="simulated")]
    figures = []
    for case, is_single in (("multi-node", False), ("single-node", True)):
        rng = random.Random(args.seed)
        groups = [_small_group(rng, is_single) for _ in range(NUM_EXACT[args.quick])]
        found = [round_robin_s(joined(group)) for group in groups]
        exact = [shortest_cycle_s(group, at_most_s=cycle) for group, cycle in zip(groups, found, strict=True)]
        solved = [
            (cycle, least, group) for cycle, least, group in zip(found, exact, groups, strict=True) if least
        ]
        same = statistics.fmean(cycle <= least + 1e-6 for cycle, least, _ in solved)
        over = max(cycle / least for cycle, least, _ in solved)
        missed = statistics.fmean(least > group.round_robin_s + 1e-6 for _, least, group in solved)
        peers: dict[str, float | None] = {
            "proved": len(solved),
            "of groups": len(groups),
            "largest ratio": over,
        }
        fifo = [longest_iteration_s(group) / cycle for group, cycle in zip(groups, found, strict=True)]
        late = statistics.fmean(ratio > 1 + 1e-6 for ratio in fifo)
        figures += [
            Figure(
                name=f"fifo_over_certificate[{case}]",
                value=late,
                unit="share",
                peers={"largest ratio": max(fifo)},
                kind="simulated",
            ),
            Figure(name=f"best_order[{case}]", value=same, unit="share", peers=peers, kind="simulated"),
            Figure(name=f"bound_missed[{case}]", value=missed, unit="share", kind="simulated"),
        ]
    return figures


def _small_group(rng: random.Random, is_single: bool) -> Group:
    num_nodes = rng.randint(2, 3)
    jobs = []
    for _ in range(rng.randint(2, 5)):
        num = 1 if is_single else rng.randint(1, num_nodes)
        nodes = tuple(sorted(rng.sample(range(num_nodes), num)))
        jobs.append((float(rng.randint(1, 60)), float(rng.randint(1, 60)), nodes))
    return group_of(jobs)


def shortest_cycle_s(group: Group, at_most_s: float) -> float | None:
    """The shortest cycle of all timetables in which every job has one iteration, or None out of time.

    `at_most_s` is a cycle that has one.

    Not limited to one order for all resources: for every two phases on a resource the solver chooses which
    comes first, and by how many cycles. Times are in sixtieths of a second, as the best cycles are
    sums of whole seconds over up to five passes.
    """
    if at_most_s <= group.round_robin_s * (1 + 1e-9):
        return at_most_s  # Theorem 1's bound holds for every timetable
    from ortools.sat.python import cp_model

    unit = 60
    model = cp_model.CpModel()
    most = round(at_most_s * unit)
    cycle = model.new_int_var(round(group.round_robin_s * unit), most, "cycle")
    on: dict[int, list[tuple[cp_model.IntVar, int]]] = {}
    for index, member in enumerate(group.members):
        rollout = round(member.job.rollout_s * unit)
        train = round(member.job.train_s_on(group.num_train_nodes) * unit)
        # A timetable may begin anywhere: with the first rollout.
        begin = model.new_int_var(0, most if index else 0, f"rollout {index}")
        then = model.new_int_var(0, 2 * most, f"train {index}")
        model.add(begin <= cycle)
        model.add(then >= begin + rollout)
        model.add(then + train <= begin + cycle)
        for node in member.rollout_nodes:
            on.setdefault(node, []).append((begin, rollout))
        on.setdefault(TRAIN_POOL, []).append((then, train))
    for node, phases in on.items():
        # Rollouts start within one cycle of each other, training phases within two.
        most_passes = 2 if node == TRAIN_POOL else 1
        for number, (first, first_ticks) in enumerate(phases):
            for second, second_ticks in phases[number + 1 :]:
                choices = []
                for passes in range(1 - most_passes, most_passes + 1):
                    chosen = model.new_bool_var("")
                    model.add(second >= first + first_ticks - passes * cycle).only_enforce_if(chosen)
                    model.add(first >= second + second_ticks - (1 - passes) * cycle).only_enforce_if(chosen)
                    choices.append(chosen)
                model.add_exactly_one(choices)
    model.minimize(cycle)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = EXACT_LIMIT_S
    return solver.value(cycle) / unit if solver.solve(model) == cp_model.OPTIMAL else None


def _times(args: argparse.Namespace) -> list[Figure]:
    rng = random.Random(args.seed)
    certify_ms, search_ms = [], []
    for _ in range(NUM_TIMED):
        group = random_group(rng)
        begin = time.perf_counter()
        certify(group, round_robin(group))
        middle = time.perf_counter()
        ordered(group, {member.job.name: limit_s(member.job) for member in group.members}, multi_rate=True)
        certify_ms.append((middle - begin) * 1e3)
        search_ms.append((time.perf_counter() - middle) * 1e3)
    return [median_figure("certify_ms", certify_ms, "ms"), median_figure("search_ms", search_ms, "ms")]


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, measure, add_arguments))
