"""A serving engine with ROSE and no rollouts beside it costs nothing that can be told from noise.

Two engines serve the same model: vLLM as it comes, and `rose serve` in a slab pool with its gate on. Both
stay alive. One is stopped (SIGSTOP) while the other serves a slice, of requests that are the same for both.
A block is four slices within a few seconds, in the order ABBA or BAAB by chance, so a drift of the machine
meets both engines alike. Nothing is pinned: the engine that runs has all CPUs. Both have the flags that a
tiny model needs: eager execution, float32, a short context. On a CPU, vLLM as it comes computes in a process
of its own, which waits for work by polling; ``--one-process`` leaves that process out, as vLLM does on a GPU.

A figure compares sums over all slices, or the P99 of all requests, so that rare costs count in full. Its
spread is the 95% interval of a bootstrap over blocks: where the machine's own stalls are larger than what is
asked, the interval says so. Beside it stands the typical ratio of a pair of slices, the Hodges-Lehmann
estimate, which a few disturbed slices don't move. Half the width of each one's interval is given. Beside wall
time stands the CPU time of all of the engine's processes.

    python benchmarks/bench_overhead.py --json overhead.json
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import psutil
from aiohttp import ClientSession
from lib.cpu_times import tree_cpu_s
from lib.harness import run_benchmark
from numpy.typing import NDArray

from rose.errors import WorkerError
from rose.measure.completions import open_session, stream_completion
from rose.measure.figures import Figure, latencies_s
from rose.measure.records import RequestRecord
from rose.measure.rig import Rig
from rose.node.control import completion_body
from rose.types import Role

STOCK, ROSE = "stock", "rose"
CONCURRENCY = 8
NUM_REQUESTS = 16
PROMPT_TOKENS = 96
OUTPUT_TOKENS = 48
WARM_TOKENS = 4
"""After an engine has been stopped, one short answer brings its pages and caches back."""
VOCABULARY = 8192
_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The name of the class: on a CPU vLLM takes the short name "uni" for "mp" (`vllm/platforms/cpu.py`)."""
WARM_UP_BLOCKS = 2
BOOTSTRAPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """What one engine did with the requests of a slice."""

    elapsed_s: float
    cpu_s: float
    ttfts_s: Sequence[float]
    tpots_s: Sequence[float]


Block = Sequence[dict[str, _Slice]]
"""Pairs of slices, by engine."""


@dataclass(frozen=True, slots=True)
class _Engine:
    url: str
    pid: int


def measure(args: argparse.Namespace) -> list[Figure]:
    minutes = args.minutes if args.minutes is not None else (1.5 if args.quick else 20.0)
    with Rig() as rig:
        rig.pool("overhead", num_slabs=64, slab_bytes=1 << 20, headroom_slabs=6)
        flags = ("--distributed-executor-backend", _IN_PROCESS) if args.one_process else ()
        server = rig.start_stock_engine(STOCK, Role.SERVING, *flags)
        rig.start_engine(ROSE, Role.SERVING, pool="overhead")
        engines = {
            STOCK: _Engine(rig.wait_stock(server), server.pid),
            ROSE: _Engine(rig.wait_engine(ROSE).url, rig.pid(ROSE)),
        }
        blocks = list(_blocks(engines, minutes, args.seed))
    rng = np.random.default_rng(args.seed)
    return _figures(blocks, rng)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=float, help="default: 20, with --quick 1.5; the spread falls as 1/sqrt"
    )
    parser.add_argument(
        "--one-process",
        action="store_true",
        help="stock vLLM computes in its scheduler's process, as it does on a GPU and as ROSE does",
    )


# Slices -----------------------------------------------------------------------------------------------------


def _blocks(engines: dict[str, _Engine], minutes: float, seed: int) -> Iterator[list[dict[str, _Slice]]]:
    """Yields blocks of two pairs for so long, after blocks that warm up."""
    ends_s, index = float("inf"), 0
    while time.monotonic() < ends_s:
        first, second = random.Random(f"{seed}-{index}").sample([STOCK, ROSE], 2)
        block = []
        for part, order in enumerate(((first, second), (second, first))):
            sent = f"{seed}-{index}-{part}"
            block.append({name: _alone(name, engines, sent) for name in order})
        if index >= WARM_UP_BLOCKS:
            yield block
        index += 1
        if index == WARM_UP_BLOCKS:
            ends_s = time.monotonic() + 60 * minutes


def _alone(name: str, engines: dict[str, _Engine], seed: str) -> _Slice:
    others = [engine.pid for other, engine in engines.items() if other != name]
    with _stopped(others):
        return asyncio.run(_serve(engines[name], seed))


@contextmanager
def _stopped(leaders: Sequence[int]) -> Iterator[None]:
    """Stops whole engines, and lets them go on in any case: a stopped process can't end itself."""
    pids = [
        process.pid
        for leader in map(psutil.Process, leaders)
        for process in (leader, *leader.children(recursive=True))
    ]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def _serve(engine: _Engine, seed: str) -> _Slice:
    """Sends the same requests for the same seed, ``CONCURRENCY`` at a time."""
    rng = random.Random(seed)
    # Distinct prompts: prefix hits would hide prefill.
    prompts = [[rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_REQUESTS + 1)]
    async with open_session() as session:
        await _complete(session, engine.url, prompts.pop(), WARM_TOKENS)
        cpu_s, start_s = tree_cpu_s(engine.pid), time.monotonic()
        done: list[RequestRecord] = []

        async def work() -> None:
            while prompts:
                done.append(await _complete(session, engine.url, prompts.pop(), OUTPUT_TOKENS))

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        elapsed_s = time.monotonic() - start_s
    return _Slice(
        elapsed_s=elapsed_s,
        cpu_s=tree_cpu_s(engine.pid) - cpu_s,
        ttfts_s=[record.token_times_s[0] - record.sent_s for record in done],
        tpots_s=latencies_s(done, "tpot"),
    )


async def _complete(session: ClientSession, url: str, prompt: list[int], max_tokens: int) -> RequestRecord:
    salt = {"cache_salt": f"{os.getpid()}-{time.monotonic_ns()}"}
    record = RequestRecord(max_tokens=max_tokens)
    body = {**completion_body(str(Role.SERVING), prompt, max_tokens), **salt}
    await stream_completion(session, url, body, record)
    if record.error is not None:
        raise WorkerError(record.error)
    return record


# Figures ----------------------------------------------------------------------------------------------------


def _figures(blocks: Sequence[Block], rng: np.random.Generator) -> list[Figure]:
    samples = [rng.integers(len(blocks), size=len(blocks)) for _ in range(BOOTSTRAPS)]

    def figure(name: str, of: Callable[[Sequence[_Slice]], float], target: str | None = None) -> Figure:
        low, high = _interval([_added([blocks[row] for row in sample], of) for sample in samples])
        ratios = np.array([[of([pair[ROSE]]) / of([pair[STOCK]]) for pair in block] for block in blocks])
        typical_low, typical_high = _interval([typical_ratio(ratios[sample]) - 1 for sample in samples])
        return Figure(
            name=name,
            value=_added(blocks, of),
            unit="share added",
            target=target,
            peers={
                "half_width": (high - low) / 2,
                "typical pair": typical_ratio(ratios) - 1,
                "half_width of typical pair": (typical_high - typical_low) / 2,
                "s of stock": of(_slices(blocks, STOCK)),
                "pairs": ratios.size,
            },
            spread=(low, high),
        )

    return [
        figure("idle_overhead_throughput", lambda some: sum(each.elapsed_s for each in some), "<= 0.01"),
        figure("idle_overhead_cpu", lambda some: sum(each.cpu_s for each in some)),
        figure("idle_overhead_tpot_p99", lambda some: _p99(each.tpots_s for each in some), "<= 0.02"),
        figure("idle_overhead_ttft_p99", lambda some: _p99(each.ttfts_s for each in some)),
    ]


def _slices(blocks: Sequence[Block], engine: str) -> list[_Slice]:
    return [pair[engine] for block in blocks for pair in block]


def _added(blocks: Sequence[Block], of: Callable[[Sequence[_Slice]], float]) -> float:
    return of(_slices(blocks, ROSE)) / of(_slices(blocks, STOCK)) - 1


def typical_ratio(ratios: NDArray[np.float64]) -> float:
    """Returns the Hodges-Lehmann estimate: the median of the geometric means of all two of the ratios."""
    logs = np.log(ratios.ravel())
    rows, columns = np.triu_indices(len(logs))
    return float(np.exp(np.median(logs[rows] + logs[columns]) / 2))


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95% interval of a bootstrap's values."""
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def _p99(values: Iterable[Sequence[float]]) -> float:
    return float(np.percentile(np.concatenate(list(values)), 99))


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, add_arguments))
