"""Multi-turn agent sessions against one rollout engine, with a tool that takes its time between the turns.

Owns the shape of the sessions. Promises the same prompts and pauses for the same seed and the same answers;
every turn's prompt is the last one, its answer, and what the tool said. Never touches serving.
"""

import asyncio
import random
from dataclasses import dataclass

import aiohttp

from rose.demo.models import ROLLOUT_SPEC
from rose.errors import WorkerError
from rose.measure.completions import open_session
from rose.node.control import EngineControl, completion_body

NUM_SESSIONS = 12
TASK_TOKENS = 256
ANSWER_TOKENS = 48
TOOL_TOKENS = 80
"""Answer and tool together fill a block of 128 tokens: prefix cache comes in whole blocks."""
MIN_TOOL_S, MAX_TOOL_S = 1.0, 9.5


@dataclass(slots=True)
class _Hits:
    """Prompt tokens from the second turn on, and how many of them were cached."""

    prompt_tokens: int = 0
    cached_tokens: int = 0


async def play_sessions(rollout: EngineControl, num_turns: int, seed: int) -> float:
    """Play all sessions at once; cached prompt tokens over prompt tokens from the second turn on.

    The engine needs ``--enable-prompt-tokens-details``. Raises: WorkerError for a turn that isn't answered
    in full.
    """
    if num_turns < 2:
        raise ValueError(f"prefix hits begin with the second turn, got {num_turns=}")
    hits = _Hits()
    async with open_session() as session:
        await asyncio.gather(
            *(_play(session, rollout, num_turns, f"{seed}-{number}", hits) for number in range(NUM_SESSIONS))
        )
    return hits.cached_tokens / hits.prompt_tokens


async def _play(
    session: aiohttp.ClientSession, rollout: EngineControl, num_turns: int, seed: str, hits: _Hits
) -> None:
    rng = random.Random(seed)
    prompt = _tokens(rng, TASK_TOKENS)
    for turn in range(num_turns):
        if turn > 0:
            await asyncio.sleep(rng.uniform(MIN_TOOL_S, MAX_TOOL_S))
        answer, num_cached = await _take_turn(session, rollout, prompt)
        if turn > 0:
            hits.prompt_tokens += len(prompt)
            hits.cached_tokens += num_cached
        prompt += answer + _tokens(rng, TOOL_TOKENS)


async def _take_turn(
    session: aiohttp.ClientSession, rollout: EngineControl, prompt: list[int]
) -> tuple[list[int], int]:
    """(answer, cached tokens of the prompt)."""
    body = completion_body(rollout.model, prompt, ANSWER_TOKENS)
    async with session.post(f"{rollout.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise WorkerError(f"{rollout.url}: {response.status} {(await response.text())[:300]}")
        message = await response.json()
    (choice,) = message["choices"]
    if choice["finish_reason"] != "length":
        raise WorkerError(
            f"a turn ended as {choice['finish_reason']} / {choice['stop_reason']} after "
            f"{len(choice['token_ids'])} of {ANSWER_TOKENS} tokens"
        )
    return choice["token_ids"], message["usage"]["prompt_tokens_details"]["cached_tokens"]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(ROLLOUT_SPEC.vocab_size) for _ in range(count)]
