"""The traffic of a profiling run: requests that make a live engine take steps of many shapes.

The scheduler records the steps (rose/engine/scheduling/recorder.py). Runs in the API server's event loop with
the gate off. Source: ROSE §4.1, which profiles costs ahead of time.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from dataclasses import dataclass

from vllm import SamplingParams
from vllm.engine.protocol import EngineClient
from vllm.inputs import TokensPrompt

from rose.engine.scheduling.recorder import num_draft_tokens

REPEATS = 3
DECODE_STEPS = 8
LONG_DECODES = 16
"""Most sequences that are decoded together at a long context. Their prefill is most of a run's time."""
FULL_BATCH_CONTEXT = 64
"""Context of each sequence in the full batch, long enough to tell what a sequence costs."""
SHORTEST_PROMPT = 16
LONG_PROMPT_CHUNKS = 4
"""Steps of the longest prompt, where the model takes so long a one: its later chunks attend the earlier."""
MIN_PROMPTS = 6
"""Fewest prompt lengths, even if a step holds few tokens. A fit needs that many observations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The prompt lengths to run one at a time, and the decode batches as (sequences, context of each)."""

    prompt_tokens: tuple[int, ...]
    batches: tuple[tuple[int, int], ...]


def shapes_for(client: EngineClient) -> Shapes:
    """Returns shapes up to the largest steps that the engine's scheduler may form: a prompt that fills a
    whole step, and as many decodes as it runs at once."""
    config = client.vllm_config
    longest = max(1, config.model_config.max_model_len - decode_tokens(client) - 1)
    prompts = [min(config.scheduler_config.max_num_batched_tokens, longest)]
    while prompts[-1] >= 2 * SHORTEST_PROMPT or len(prompts) < MIN_PROMPTS:
        prompts.append(max(1, prompts[-1] // 2))
    if longest > prompts[0]:
        prompts.append(min(LONG_PROMPT_CHUNKS * prompts[0], longest))
    most = config.scheduler_config.max_num_seqs
    few = min(most, LONG_DECODES)
    contexts = {max(1, longest // 16), max(1, longest // 4)}
    batches = {(max(1, few >> i), context) for i in (0, 2, 4) for context in contexts}
    if most > few:
        batches.add((most, min(FULL_BATCH_CONTEXT, longest)))
    return Shapes(prompt_tokens=tuple(prompts), batches=tuple(sorted(batches)))


def decode_tokens(client: EngineClient) -> int:
    """Returns the tokens of an answer with at least DECODE_STEPS decode steps, if every draft is accepted."""
    return DECODE_STEPS * (1 + num_draft_tokens(client.vllm_config))


async def warm_up(client: EngineClient, rank: int | None = None) -> None:
    """Samples one token with its logprob. vLLM compiles for that at the first time, which takes seconds in
    which a rollout step would hold the GPU. ``rank`` is the data-parallel rank if there are several."""
    await _generate(client, random.Random(0), 1, max_tokens=1, temperature=1.0, logprobs=1, rank=rank)


async def run_shapes(client: EngineClient, shapes: Shapes, rank: int | None = None, *, seed: int = 0) -> None:
    """Sends the traffic in whole rounds, so that a slow second of the machine affects every shape a
    little."""
    rng, num_decoded = random.Random(seed), decode_tokens(client)
    for _ in range(REPEATS):
        for length in shapes.prompt_tokens:
            await _generate(client, rng, length, max_tokens=1, rank=rank)
        for count, context in shapes.batches:
            await asyncio.gather(
                *(_generate(client, rng, context, max_tokens=num_decoded, rank=rank) for _ in range(count))
            )


async def _generate(
    client: EngineClient,
    rng: random.Random,
    length: int,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    logprobs: int | None = None,
    rank: int | None = None,
) -> None:
    vocab = client.vllm_config.model_config.get_vocab_size()
    prompt = TokensPrompt(prompt_token_ids=[rng.randrange(vocab) for _ in range(length)])
    params = SamplingParams(
        temperature=temperature,
        logprobs=logprobs,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
    )
    name = f"rose-profile-{uuid.uuid4().hex}"
    async for _ in client.generate(prompt, params, request_id=name, data_parallel_rank=rank):
        await asyncio.sleep(0)
