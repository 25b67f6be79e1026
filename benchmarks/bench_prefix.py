"""A trajectory's next turn finds the KV that its last one left: two real engines behind the router.

Twelve trajectories at a time of six turns; every prompt is the last one, its answer, and what a tool said
after a pause. Two rollout engines stand behind `rose router`, once for each policy, with session keys and
without (where the router knows a trajectory by how its prompt begins).

  prefix_hit_gap[POLICY]   percentage points of prompt tokens that an earlier turn of the same trajectory had
                           computed, in whole blocks as vLLM keeps them, and that were not found cached

Beside it, the ideal and how many turns ran on another engine than the one before.

    python benchmarks/bench_prefix.py --json prefix.json
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lib.harness import median_figure, run_benchmark
from lib.load.turns import RouterClient, random_prompt, until_so

from rose.errors import WorkerError
from rose.measure.figures import Figure
from rose.measure.rig import Rig
from rose.types import GateMode, Role

NUM_SESSIONS = 12
NUM_TURNS = 6
TASK_TOKENS = 200
MIN_ANSWER_TOKENS, MAX_ANSWER_TOKENS = 24, 64
MIN_TOOL_TOKENS, MAX_TOOL_TOKENS = 20, 60
MIN_TOOL_S, MAX_TOOL_S = 0.05, 0.5
POLICIES = ("paper", "cost")
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
    with Rig() as rig:
        for name in ("a", "b"):
            rig.start_engine(
                name, Role.ROLLOUT, gate=GateMode.OFF, vllm_args=("--enable-prompt-tokens-details",)
            )
        workers = [rig.wait_engine(name).url for name in ("a", "b")]
        for policy in POLICIES:
            for has_keys in (True, False):
                url = rig.start_router(workers, "--policy", policy, name=f"router-{policy}-{has_keys}")
                names = [f"{policy}-{has_keys}-{args.seed}-{i}" for i in range(1 if args.quick else 3)]
                tallies = [asyncio.run(_play_all(url, name, has_keys)) for name in names]
                figures.append(_figure(policy if has_keys else f"{policy},no key", tallies))
    return figures


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


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
