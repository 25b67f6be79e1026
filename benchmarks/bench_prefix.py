"""A trajectory's next turn finds the KV that its last one left: two real engines behind the router.

Twelve trajectories of six turns run at a time. Every prompt is the last prompt, its answer, and what a tool
said after a pause. Two rollout engines stand behind `rose router`, once for each policy, with session keys
and without (where the router knows a trajectory by how its prompt begins).

  prefix_hit_gap[POLICY]   percentage points of prompt tokens that an earlier turn of the same trajectory had
                           computed, in whole blocks as vLLM keeps them, and that were not found cached

Beside it, the ideal and how many turns ran on another engine than the one before.

  cost_over_paper_real[alike]   the time of a rollout phase under policy `paper` / that under `cost`, by pairs
  cost_over_paper_real[unlike]  the same with one engine at half its speed: a process that always computes
                                shares its core, as serving shares a GPU
  cost_over_paper_real[light]   the same with half as many trajectories, so that turns find a choice of places

A phase is over when the last of its trajectories is. Their turns, answers and pauses vary
(lib/load/phases.py). Each phase has a router of its own, which knows nothing of the engines at first. The
policies take turns at going first.

    python benchmarks/bench_prefix.py --json prefix.json [--cases alike,unlike]
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lib.harness import median_figure, run_benchmark
from lib.load.phases import FULL_GROUPS, LIGHT_GROUPS, PlayedPhase, play_phase
from lib.load.turns import RouterClient, random_prompt, until_so

from rose.errors import WorkerError
from rose.measure.figures import Figure
from rose.measure.rig import Rig, pin_tree
from rose.types import GateMode, Role

NUM_SESSIONS = 12
NUM_TURNS = 6
TASK_TOKENS = 200
MIN_ANSWER_TOKENS, MAX_ANSWER_TOKENS = 24, 64
MIN_TOOL_TOKENS, MAX_TOOL_TOKENS = 20, 60
MIN_TOOL_S, MAX_TOOL_S = 0.05, 0.5
POLICIES = ("paper", "cost")
CASES = ("prefix", "alike", "unlike", "light")
NUM_PAIRS = {True: 2, False: 6}
"""The pairs of phases by --quick."""
BLOCK_TOKENS = 128
"""vLLM's block on the CPU: the prefix cache comes in whole ones."""


@dataclass(slots=True)
class Tally:
    """Counts the prompt tokens of all turns but each trajectory's first."""

    prompt: int = 0
    ideal: int = 0
    cached: int = 0
    num_turns: int = 0
    num_moved: int = 0

    def gap(self) -> float:
        """Percentage points."""
        return 100.0 * (self.ideal - self.cached) / self.prompt


def measure(args: argparse.Namespace) -> list[Figure]:
    figures = []
    cases = args.cases.split(",")
    if "prefix" in cases:
        with Rig() as rig:
            figures += _prefixes(rig, _start_engines(rig), args)
    if {"alike", "unlike", "light"} & set(cases):
        with Rig() as rig:
            workers = _start_engines(rig, rig.model(Role.SERVING))
            if "alike" in cases:
                figures.append(_phases(rig, "alike", workers, args))
            if {"unlike", "light"} & set(cases):
                with _slowed(rig):
                    for case, num_groups in (("light", LIGHT_GROUPS), ("unlike", FULL_GROUPS)):
                        if case in cases:
                            figures.append(_phases(rig, case, workers, args, num_groups))
    return figures


@contextmanager
def _slowed(rig: Rig) -> Iterator[None]:
    """Gives one engine half of the first CPU, and all other processes the rest. Raises: WorkerError without a
    second one."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise WorkerError("the cases `unlike` and `light` need two CPUs")
    pin_tree(rig.pid("a"), cpus[:1])
    pin_tree(rig.pid("b"), cpus[1:])
    rig.others = tuple(cpus[1:])
    busy = rig.run(["-c", "while True: pass"], "busy")
    pin_tree(busy.pid, cpus[:1])
    os.sched_setaffinity(0, cpus[1:])
    try:
        yield
    finally:
        busy.stop()
        os.sched_setaffinity(0, cpus)


def _start_engines(rig: Rig, model: Path | None = None) -> list[str]:
    for name in ("a", "b"):
        flags = ("--enable-prompt-tokens-details",)
        rig.start_engine(name, Role.ROLLOUT, model=model, gate=GateMode.OFF, vllm_args=flags)
    return [rig.wait_engine(name).url for name in ("a", "b")]


def _prefixes(rig: Rig, workers: Sequence[str], args: argparse.Namespace) -> list[Figure]:
    figures = []
    for policy in POLICIES:
        for has_keys in (True, False):
            url = rig.start_router(workers, "--policy", policy, name=f"router-{policy}-{has_keys}")
            names = [f"{policy}-{has_keys}-{args.seed}-{i}" for i in range(1 if args.quick else 3)]
            tallies = [asyncio.run(_play_all(url, name, has_keys)) for name in names]
            figures.append(_figure(policy if has_keys else f"{policy},no key", tallies))
    return figures


def _phases(
    rig: Rig, case: str, workers: Sequence[str], args: argparse.Namespace, num_groups: int = FULL_GROUPS
) -> Figure:
    """Plays pairs of phases, each pair with the same lengths under both policies. The first one warms up."""
    phases: dict[str, list[PlayedPhase]] = {policy: [] for policy in POLICIES}
    for number in range(NUM_PAIRS[args.quick] + 1):
        for policy in POLICIES if number % 2 else POLICIES[::-1]:
            name = f"{case}-{policy}-{args.seed}-{number}"
            router, url = rig.run_router(workers, "--policy", policy, name=f"router-{name}")
            phases[policy].append(asyncio.run(play_phase(url, name, f"{args.seed}-{number}", num_groups)))
            router.stop()
            print(f"{name}: {phases[policy][-1]}", file=sys.stderr)
    paper, cost = (phases[policy][1:] for policy in POLICIES)
    return median_figure(
        f"cost_over_paper_real[{case}]",
        [slow.took_s / fast.took_s for slow, fast in zip(paper, cost, strict=True)],
        "x",
        target=">= 1.05",
        peers={
            f"{what}, {policy}": statistics.median(getattr(each, field) for each in found)
            for policy, found in (("paper", paper), ("cost", cost))
            for what, field in (("s", "took_s"), ("hits, %", "hit_percent"), ("moved", "num_moved"))
        },
    )


async def _play_all(url: str, name: str, has_keys: bool) -> Tally:
    tally = Tally()
    async with RouterClient(url, str(Role.ROLLOUT)) as client:

        async def are_alive() -> bool:
            return all(worker["alive"] for worker in (await client.status())["workers"])

        await until_so(are_alive, "both engines are there")
        sessions = [f"{name}-{number}" for number in range(NUM_SESSIONS)]
        await asyncio.gather(*(_play(client, session, has_keys, tally) for session in sessions))
    return tally


async def _play(client: RouterClient, session: str, has_keys: bool, tally: Tally) -> None:
    rng = random.Random(session)
    prompt = random_prompt(session, TASK_TOKENS)
    num_computed, last_worker = 0, None
    for number in range(NUM_TURNS):
        num_answer = rng.randint(MIN_ANSWER_TOKENS, MAX_ANSWER_TOKENS)
        turn = await client.run(prompt, num_answer, session if has_keys else None)
        if not turn.is_whole(num_answer):
            raise WorkerError(f"a turn ended as {turn.finish_reason} / {turn.error}")
        worker = turn.workers[-1]
        if number > 0:
            tally.prompt += len(prompt)
            tally.ideal += num_computed // BLOCK_TOKENS * BLOCK_TOKENS
            tally.cached += turn.rose["cached_tokens"] or 0
            tally.num_turns += 1
            tally.num_moved += worker != last_worker
        last_worker = worker
        num_computed = len(prompt) + num_answer - 1  # nothing was computed from the last token
        tool = random_prompt(f"{session}-{number}", rng.randint(MIN_TOOL_TOKENS, MAX_TOOL_TOKENS))
        prompt = [*prompt, *turn.token_ids, *tool]
        await asyncio.sleep(rng.uniform(MIN_TOOL_S, MAX_TOOL_S))


def _figure(name: str, tallies: Sequence[Tally]) -> Figure:
    prompt = sum(tally.prompt for tally in tallies)
    return median_figure(
        f"prefix_hit_gap[{name}]",
        [tally.gap() for tally in tallies],
        "points",
        target="<= 2",
        peers={
            "ideal, %": 100.0 * sum(tally.ideal for tally in tallies) / prompt,
            "turns": float(sum(tally.num_turns for tally in tallies)),
            "of them on another engine": float(sum(tally.num_moved for tally in tallies)),
        },
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default=",".join(CASES), help="some of them (default %(default)s)")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
