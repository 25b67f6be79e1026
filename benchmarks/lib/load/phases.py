"""A rollout phase of an RL step: trajectories of several turns, from the first prompt to the last answer.

Owns the trajectories' lengths and the clock of the phase. Promises that phases with the same `lengths` have
the same turns, answers and pauses, and that no two phases share prompts. Never starts an engine or a router.
"""

import asyncio
import random
import time
from dataclasses import dataclass

from lib.load.turns import RouterClient, Turn, random_prompt, until_so
from rose.errors import WorkerError
from rose.types import Role

GROUP_SIZE = 8
FULL_GROUPS, LIGHT_GROUPS = 6, 3
"""Half as many trajectories again as two engines have places, and three quarters as many."""
TASK_TOKENS = 200
MAX_TURNS, MEAN_TURNS = 6, 3.0
MEAN_ANSWER_TOKENS, MAX_ANSWER_TOKENS = 32, 64
MIN_TOOL_TOKENS, MAX_TOOL_TOKENS = 8, 24
MEAN_TOOL_S = 0.3
LEASES_S = 1.5
"""After this long the engines no longer keep turns for the router of the phase before."""


@dataclass(slots=True)
class PlayedPhase:
    """What a phase took, and where its turns found their prefixes."""

    took_s: float = 0.0
    num_turns: int = 0
    num_moved: int = 0
    """Turns on another engine than their trajectory's last one."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def hit_percent(self) -> float:
        return 100.0 * self.num_cached_tokens / self.num_prompt_tokens


async def play_phase(url: str, name: str, lengths: str, num_groups: int = FULL_GROUPS) -> PlayedPhase:
    """Plays all trajectories at once. `name`: names the sessions and makes the prompts. `lengths`: the seed
    of everything else."""
    phase = PlayedPhase()
    async with RouterClient(url, str(Role.ROLLOUT)) as client:

        async def are_alive() -> bool:
            return all(worker["alive"] for worker in (await client.status())["workers"])

        await until_so(are_alive, "both engines are there")
        await asyncio.sleep(LEASES_S)
        started = time.monotonic()
        trajectories = [(group, sibling) for group in range(num_groups) for sibling in range(GROUP_SIZE)]
        await asyncio.gather(*(_play(client, name, lengths, *each, phase) for each in trajectories))
        phase.took_s = time.monotonic() - started
    return phase


async def _play(
    client: RouterClient, name: str, lengths: str, group: int, sibling: int, phase: PlayedPhase
) -> None:
    """Plays one trajectory. The siblings of a group begin with one prompt, and groups differ in the length of
    their turns."""
    difficulty = random.Random(f"{lengths}-{group}").lognormvariate(0.0, 0.4)
    rng, session = random.Random(f"{lengths}-{group}-{sibling}"), f"{name}-{group}-{sibling}"
    prompt, last_worker = random_prompt(f"{name}-{group}", TASK_TOKENS), None
    for number in range(min(MAX_TURNS, 1 + int(rng.expovariate(1 / MEAN_TURNS)))):
        wanted = MEAN_ANSWER_TOKENS * difficulty * rng.lognormvariate(0.0, 0.3)
        num_answer = max(8, min(MAX_ANSWER_TOKENS, round(wanted)))
        turn = await client.run(prompt, num_answer, session)
        if not turn.is_whole(num_answer):
            raise WorkerError(f"a turn ended as {turn.finish_reason} / {turn.error}")
        _count(phase, turn, len(prompt), last_worker)
        last_worker = turn.workers[-1]
        tool = random_prompt(f"{session}-{number}", rng.randint(MIN_TOOL_TOKENS, MAX_TOOL_TOKENS))
        prompt = [*prompt, *turn.token_ids, *tool]
        await asyncio.sleep(rng.expovariate(1 / MEAN_TOOL_S))


def _count(phase: PlayedPhase, turn: Turn, num_prompt: int, last_worker: str | None) -> None:
    phase.num_turns += 1
    phase.num_moved += last_worker is not None and turn.workers[-1] != last_worker
    phase.num_prompt_tokens += num_prompt
    phase.num_cached_tokens += turn.rose["cached_tokens"] or 0
