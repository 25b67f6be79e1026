"""A serving engine with ROSE and no rollouts beside it costs nothing that can be told from noise.

Three engines serve the same model, one at a time, in turn: stock vLLM as it comes, stock vLLM with ROSE's
executor (one rank in the engine's own process), and ROSE with a slab pool and the gate on. Each round gives
every engine the same requests; a round's figures are ratios of ROSE to stock, and the medians over the rounds
are reported, so that a drift of the machine cancels out. Nothing is pinned: every engine gets all CPUs.

    python benchmarks/bench_overhead.py --json overhead.json
"""

import argparse
import asyncio
import os
import random
import sys
import time
from dataclasses import dataclass

from aiohttp import ClientSession
from lib.harness import median_figure, run_benchmark

from rose.errors import WorkerError
from rose.measure.completions import open_session, stream_completion
from rose.measure.figures import Figure, percentile, tpots_s
from rose.measure.records import RequestRecord
from rose.measure.rig import Rig
from rose.node.control import completion_body
from rose.types import Role

CONCURRENCY = 8
PROMPT_TOKENS = 96
OUTPUT_TOKENS = 48
VOCABULARY = 8192
SAME_EXECUTOR = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    tokens_per_s: float
    tpot_p99_s: float
    ttft_p99_s: float


def measure(args: argparse.Namespace) -> list[Figure]:
    num_rounds, num_requests = (4, 32) if args.quick else (12, 64)
    with Rig() as rig:
        rig.pool("overhead", num_slabs=64, slab_bytes=1 << 20, headroom_slabs=6)
        engines = {
            "stock": rig.start_stock_engine("stock", Role.SERVING),
            "same executor": rig.start_stock_engine("same-executor", Role.SERVING, *SAME_EXECUTOR),
        }
        rig.start_engine("rose", Role.SERVING, pool="overhead")
        urls = {name: rig.wait_stock(server) for name, server in engines.items()}
        urls["rose"] = rig.wait_engine("rose").url
        rounds: dict[str, list[_Round]] = {name: [] for name in urls}
        for index in range(-1, num_rounds):
            for name in random.Random(args.seed + index).sample(list(urls), len(urls)):
                result = asyncio.run(_serve(urls[name], num_requests, seed=args.seed + index))
                if index >= 0:  # the first round warms up
                    rounds[name].append(result)
    return [figure for peer in ("stock", "same executor") for figure in _figures(rounds, peer)]


def _figures(rounds: dict[str, list[_Round]], peer: str) -> list[Figure]:
    pairs = list(zip(rounds["rose"], rounds[peer], strict=True))
    case = "" if peer == "stock" else f"[{peer}]"
    rates = [one.tokens_per_s for one in rounds[peer]]
    return [
        median_figure(
            f"idle_overhead_throughput{case}",
            [1 - ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs],
            "share lost",
            target="<= 0.01",
            peers={"tokens/s of the peer": sum(rates) / len(rates)},
        ),
        median_figure(
            f"idle_overhead_tpot_p99{case}",
            [ours.tpot_p99_s / theirs.tpot_p99_s - 1 for ours, theirs in pairs],
            "share added",
            target="<= 0.02",
        ),
        median_figure(
            f"idle_overhead_ttft_p99{case}",
            [ours.ttft_p99_s / theirs.ttft_p99_s - 1 for ours, theirs in pairs],
            "share added",
        ),
    ]


async def _serve(url: str, num_requests: int, seed: int) -> _Round:
    """Sends the same requests for the same seed, ``CONCURRENCY`` at a time."""
    rng = random.Random(seed)
    # Distinct prompts: prefix hits would hide prefill.
    prompts = [[rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(num_requests)]
    done: list[RequestRecord] = []

    async def work(session: ClientSession) -> None:
        while prompts:
            body = {
                **completion_body(str(Role.SERVING), prompts.pop(), OUTPUT_TOKENS),
                "cache_salt": f"{os.getpid()}-{time.monotonic_ns()}",
            }
            record = RequestRecord(max_tokens=OUTPUT_TOKENS)
            await stream_completion(session, url, body, record)
            if record.error is not None:
                raise WorkerError(record.error)
            done.append(record)

    start_s = time.monotonic()
    async with open_session() as session:
        await asyncio.gather(*(work(session) for _ in range(CONCURRENCY)))
    elapsed_s = time.monotonic() - start_s
    tpot_p99 = percentile(tpots_s(done), 99)
    ttft_p99 = percentile([record.token_times_s[0] - record.sent_s for record in done], 99)
    assert tpot_p99 is not None and ttft_p99 is not None
    return _Round(
        tokens_per_s=sum(len(record.token_ids) for record in done) / elapsed_s,
        tpot_p99_s=tpot_p99,
        ttft_p99_s=ttft_p99,
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
