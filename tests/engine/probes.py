"""The prompts of the tests: drawn from fixed seeds, so that stock vLLM can answer the same ones."""

import random

from tiny_models import BLOCK_TOKENS, VOCABULARY

from rose.types import Role

WAVES = 3
"""Each: rollouts fill their budget, then a serving burst takes half of it."""
SERVING_TOKENS = 24
ROLLOUT_TOKENS = 60
PROBE_TOKENS = 16
NUM_VERSIONS = 5


def prompt(seed: object, length: int) -> list[int]:
    rng = random.Random(f"{seed}")
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def wave_prompts(role: Role, wave: int) -> list[list[int]]:
    """Serving: 5 prompts of 2-3 slabs each, more than the headroom. Rollout: 10 of 2 each."""
    count, shortest, longest = (5, 200, 330) if role is Role.SERVING else (10, 300, 420)
    lengths = random.Random(f"{role}-{wave}")
    return [prompt(f"{role}-{wave}-{index}", lengths.randrange(shortest, longest)) for index in range(count)]


def probes() -> list[list[int]]:
    """For comparing weights: one within a KV block, two that leave full blocks in the prefix cache."""
    return [prompt(f"probe-{length}", length) for length in (60, BLOCK_TOKENS + 20, 3 * BLOCK_TOKENS + 5)]
