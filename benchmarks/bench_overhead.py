"""A serving engine with ROSE and no rollouts beside it costs nothing that can be told from noise.

Three engines serve the same model, one at a time: stock vLLM with its own executor, stock vLLM with ROSE's
(one rank in the engine's own process), and ROSE with a slab pool and the gate on. Every round gives each
engine the same requests, in a random order of engines. Rounds are short and many, so that a drift of the
machine meets all engines alike. Nothing is pinned: every engine gets all CPUs. All three have the flags that
a tiny model needs: eager execution, float32, a short context.

A figure compares all rounds of ROSE with all rounds of its peer. Its spread is the 95% interval of a
bootstrap over rounds, which keeps the engines' results of one round together. Beside wall time stands the
CPU time of the engine's processes, which other processes of the machine disturb less.

    python benchmarks/bench_overhead.py --json overhead.json
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from aiohttp import ClientSession
from lib.cpu_times import cpu_use_s
from lib.harness import run_benchmark
from rich.console import Console
from rich.progress import track

from rose.errors import WorkerError
from rose.measure.completions import open_session, stream_completion
from rose.measure.figures import Figure, latencies_s
from rose.measure.records import RequestRecord
from rose.measure.rig import Rig
from rose.node.control import completion_body
from rose.types import Role

CONCURRENCY = 8
PROMPT_TOKENS = 96
OUTPUT_TOKENS = 48
VOCABULARY = 8192
SAME_EXECUTOR = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
BOOTSTRAPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """What one engine did with the requests of one round."""

    elapsed_s: float
    cpu_s: float
    ttfts_s: Sequence[float]
    tpots_s: Sequence[float]


def measure(args: argparse.Namespace) -> list[Figure]:
    num_rounds, num_requests = (8, 16) if args.quick else (40, 24)
    num_rounds = args.rounds if args.rounds is not None else num_rounds
    with Rig() as rig:
        rig.pool("overhead", num_slabs=64, slab_bytes=1 << 20, headroom_slabs=6)
        stock = {
            "stock": rig.start_stock_engine("stock", Role.SERVING),
            "same executor": rig.start_stock_engine("same-executor", Role.SERVING, *SAME_EXECUTOR),
        }
        rig.start_engine("rose", Role.SERVING, pool="overhead")
        engines = {name: (rig.wait_stock(server), server.pid) for name, server in stock.items()}
        engines["rose"] = (rig.wait_engine("rose").url, rig.pid("rose"))
        rounds: dict[str, list[_Round]] = {name: [] for name in engines}
        for index in track(range(-2, num_rounds), "rounds", console=Console(stderr=True)):
            seed = f"{args.seed}-{index}"
            for name in random.Random(seed).sample(list(engines), len(engines)):
                result = asyncio.run(_serve(*engines[name], num_requests, seed))
                if index >= 0:  # the first rounds warm up
                    rounds[name].append(result)
    rng = np.random.default_rng(args.seed)
    return [figure for peer in stock for figure in _figures(rounds["rose"], rounds[peer], peer, rng)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="default: 40, with --quick 8; the spread falls as 1/sqrt")


def _figures(
    ours: Sequence[_Round], theirs: Sequence[_Round], peer: str, rng: np.random.Generator
) -> list[Figure]:
    case = "" if peer == "stock" else f"[{peer}]"

    def figure(name: str, of: Callable[[Sequence[_Round]], float], target: str | None = None) -> Figure:
        low, high = _interval(lambda chosen: _over(of, ours, theirs, chosen), len(ours), rng)
        return Figure(
            name=f"{name}{case}",
            value=_over(of, ours, theirs, range(len(ours))),
            unit="share added",
            target=target,
            peers={"half-width": (high - low) / 2, "s of the peer": of(theirs)},
            spread=(low, high),
        )

    return [
        figure("idle_overhead_throughput", _elapsed_s, "<= 0.01"),
        figure("idle_overhead_cpu", _cpu_s),
        figure("idle_overhead_tpot_p99", _p99(lambda one: one.tpots_s), "<= 0.02"),
        figure("idle_overhead_ttft_p99", _p99(lambda one: one.ttfts_s)),
    ]


def _elapsed_s(rounds: Sequence[_Round]) -> float:
    return sum(one.elapsed_s for one in rounds)


def _cpu_s(rounds: Sequence[_Round]) -> float:
    return sum(one.cpu_s for one in rounds)


def _p99(values: Callable[[_Round], Sequence[float]]) -> Callable[[Sequence[_Round]], float]:
    return lambda rounds: float(np.percentile(np.concatenate([values(one) for one in rounds]), 99))


def _over(
    of: Callable[[Sequence[_Round]], float],
    ours: Sequence[_Round],
    theirs: Sequence[_Round],
    chosen: Sequence[int],
) -> float:
    """Returns how much more of something ``ours`` has in the chosen rounds than ``theirs``, as a share."""
    return of([ours[index] for index in chosen]) / of([theirs[index] for index in chosen]) - 1


def _interval(
    value: Callable[[Sequence[int]], float], num_rounds: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Returns the 95% interval of a percentile bootstrap over rounds."""
    values = [value(rng.integers(num_rounds, size=num_rounds).tolist()) for _ in range(BOOTSTRAPS)]
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


async def _serve(url: str, pid: int, num_requests: int, seed: str) -> _Round:
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

    cpu_s, start_s = _engine_cpu_s(pid), time.monotonic()
    async with open_session() as session:
        await asyncio.gather(*(work(session) for _ in range(CONCURRENCY)))
    return _Round(
        elapsed_s=time.monotonic() - start_s,
        cpu_s=_engine_cpu_s(pid) - cpu_s,
        ttfts_s=[record.token_times_s[0] - record.sent_s for record in done],
        tpots_s=latencies_s(done, "tpot"),
    )


def _engine_cpu_s(pid: int) -> float:
    return sum(seconds for part, seconds in cpu_use_s(pid).items() if part.endswith("computed"))


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, add_arguments))
