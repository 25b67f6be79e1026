"""Serving in a pool has as many prefix hits as stock vLLM with the same KV memory, and as short a TTFT.

Stock vLLM and ROSE's serving engine get the same rounds of chats, in turn: several at once, all with the same
system prompt, each of several turns with a pause of seconds between them. Every round brings new chats, so
both have to evict the old ones. The pool has as many KV blocks as stock vLLM.

`prefix_hits_kept`: ROSE's cached prompt tokens over its prompt tokens, as a share of the same of stock vLLM.
`prefix_ttft_ratio`: the median TTFT of all turns, over stock vLLM's. [idle]: a pool without a rollout engine.
[loaded]: a rollout engine has come, and while ROSE serves it works on more turns than fit into its budget.
Medians over the rounds. Nothing is pinned.

    python benchmarks/bench_serving_cache.py --json serving_cache.json
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from lib.harness import median_figure, run_benchmark

from rose.errors import WorkerError
from rose.measure.completions import open_session, stream_completion
from rose.measure.figures import Figure
from rose.measure.models import ROLLOUT_SPEC, SERVING_SPEC
from rose.measure.records import RequestRecord
from rose.measure.rig import Rig
from rose.node.control import EngineControl, completion_body
from rose.types import Role

POOL = "serving-cache"
SLAB_BYTES = 1536 << 10
"""Two blocks of the serving model, or 12 of the rollout model, and nothing else."""
NUM_SLABS, HEADROOM_SLABS = 30, 6
"""Too few for the live chats and the cache of all turns at once, so rollouts have to take cache."""
CACHED_DETAILS = "--enable-prompt-tokens-details"
REPORT_USAGE = {"stream_options": {"include_usage": True}}
NUM_CHATS, NUM_TURNS = 8, 4
SYSTEM_TOKENS = 256
USER_TOKENS, ANSWER_TOKENS = 96, 32
"""Together a block of 128 tokens: prefix cache comes in whole blocks."""
MIN_THINK_S, MAX_THINK_S = 1.0, 4.0
NUM_ROLLOUTS = 24
ROLLOUT_PROMPT_TOKENS, ROLLOUT_TOKENS = 300, 300
HITS_TARGETS = {"idle": ">= 0.99", "loaded": ">= 0.90"}
TTFT_TARGETS = {"idle": "<= 1.02", "loaded": "<= 1.15"}


@dataclass(slots=True)
class _Round:
    """What one engine's chats of one round found."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    rollout_tokens_per_s: float = 0.0
    serving_slabs: int = 0
    """Those that serving holds when the round ends."""

    @property
    def hit_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def ttft_p50_s(self) -> float:
        return statistics.median(self.ttfts_s)


def measure(args: argparse.Namespace) -> list[Figure]:
    num_rounds = 2 if args.quick else 8
    with Rig() as rig:
        pool = rig.pool(POOL, num_slabs=NUM_SLABS, slab_bytes=SLAB_BYTES, headroom_slabs=HEADROOM_SLABS)
        rig.start_engine("serving", Role.SERVING, pool=POOL, vllm_args=(CACHED_DETAILS,))
        memory = ("--kv-cache-memory-bytes", str(NUM_SLABS * SLAB_BYTES))
        stock = rig.start_stock_engine("stock", Role.SERVING, CACHED_DETAILS, *memory)
        serving, stock_url = rig.wait_engine("serving"), rig.wait_stock(stock)
        pairs: dict[str, list[tuple[_Round, _Round]]] = {"idle": [], "loaded": []}
        rollout: EngineControl | None = None
        for case, measured in pairs.items():
            if case == "loaded":
                rig.start_engine("rollout", Role.ROLLOUT, pool=POOL)
                rollout = rig.wait_engine("rollout")
                rollout.profile()
                serving.profile()
            for index in range(-1, num_rounds):
                seed = f"{args.seed}-{case}-{index}"
                if rollout is not None:
                    rollout.begin_rl_step(index + 2)
                ours = asyncio.run(_play_round(serving.url, seed, rollout))
                ours.serving_slabs = pool.ledger.num_held(Role.SERVING)
                theirs = asyncio.run(_play_round(stock_url, seed, None))
                if index >= 0:  # the first round warms up
                    measured.append((ours, theirs))
    return [figure for case, measured in pairs.items() for figure in _figures(case, measured)]


def _figures(case: str, pairs: Sequence[tuple[_Round, _Round]]) -> list[Figure]:
    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values)

    return [
        median_figure(
            f"prefix_hits_kept[{case}]",
            [ours.hit_share / theirs.hit_share for ours, theirs in pairs],
            "x stock vLLM",
            target=HITS_TARGETS[case],
            peers={
                "hit share": mean([ours.hit_share for ours, _ in pairs]),
                "hit share of stock vLLM": mean([theirs.hit_share for _, theirs in pairs]),
                "slabs that serving holds": mean([ours.serving_slabs for ours, _ in pairs]),
            },
        ),
        median_figure(
            f"prefix_ttft_ratio[{case}]",
            [ours.ttft_p50_s / theirs.ttft_p50_s for ours, theirs in pairs],
            "x stock vLLM",
            target=TTFT_TARGETS[case],
            peers={
                "ms of stock vLLM": mean([theirs.ttft_p50_s * 1e3 for _, theirs in pairs]),
                "rollout tokens/s": mean([ours.rollout_tokens_per_s for ours, _ in pairs]),
            },
        ),
    ]


async def _play_round(url: str, seed: str, rollout: EngineControl | None) -> _Round:
    """Plays all chats of a round at once, beside rollouts if there are any."""
    result, system = _Round(), _tokens(random.Random("system"), SYSTEM_TOKENS, SERVING_SPEC.vocab_size)
    rollouts: list[RequestRecord] = []
    async with open_session() as session:
        workers = [
            asyncio.create_task(_roll_out(session, rollout, f"{seed}-{number}", rollouts))
            for number in range(NUM_ROLLOUTS)
            if rollout is not None
        ]
        started_s = time.monotonic()
        chats = (_chat(session, url, system, f"{seed}-{number}", result) for number in range(NUM_CHATS))
        try:
            await asyncio.gather(*chats)
            elapsed_s = time.monotonic() - started_s
            result.rollout_tokens_per_s = sum(len(one.token_ids) for one in rollouts) / elapsed_s
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return result


async def _chat(
    session: aiohttp.ClientSession, url: str, system: list[int], seed: str, result: _Round
) -> None:
    """Takes every turn of one chat: the last prompt, its answer, and what the user says next."""
    rng = random.Random(seed)
    prompt = list(system)
    for _ in range(NUM_TURNS):
        await asyncio.sleep(rng.uniform(MIN_THINK_S, MAX_THINK_S))
        prompt += _tokens(rng, USER_TOKENS, SERVING_SPEC.vocab_size)
        body = completion_body(str(Role.SERVING), prompt, ANSWER_TOKENS)
        record = RequestRecord(max_tokens=ANSWER_TOKENS)
        await stream_completion(session, url, body | REPORT_USAGE, record)
        if record.error is not None:
            raise WorkerError(f"{url}: {record.error}")
        result.ttfts_s.append(record.token_times_s[0] - record.sent_s)
        result.prompt_tokens += len(prompt)
        result.cached_tokens += record.num_cached_tokens or 0
        prompt += record.token_ids


async def _roll_out(
    session: aiohttp.ClientSession, rollout: EngineControl, seed: str, done: list[RequestRecord]
) -> None:
    """Takes one turn after the other until it is cancelled. One that serving ended counts as far as it
    came."""
    rng = random.Random(seed)
    while True:
        prompt = _tokens(rng, ROLLOUT_PROMPT_TOKENS, ROLLOUT_SPEC.vocab_size)
        done.append(RequestRecord(max_tokens=ROLLOUT_TOKENS))
        body = completion_body(rollout.model, prompt, ROLLOUT_TOKENS)
        await stream_completion(session, rollout.url, body, done[-1])
        if done[-1].status != 200:
            raise WorkerError(f"{rollout.url}: {done[-1].error}")


def _tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
