"""A router that dies costs its clients one reconnect, and no GPU gets more turns than its cap.

Two `rose router` processes, each with the other as its peer, stand before two stand-in engines of 8 GPUs. The
engines divide their turns by the leases of a real engine, and count turns separately. Clients stream turns at
both routers.

First one router is killed under 200 streams. Each of its clients connects once to the other router, and says
which tokens it has. Then short turns run at both routers while one or the other is killed and started again.
Last, two jobs take turns on one serving GPU, each at a router of its own; no weights move.

  router_kill_failed   turns that did not end exactly as the engine's own after one reconnect
  router_back_s        the longest time from the end of a connection to the turn's next token, less the time
                       that the engine takes for its first tokens
  over_cap             turns that an engine ran above its cap, at worst
  lend_switch_s        the longest time between the last turn of a job and the first turn of the other, which
                       waits already
  lend_overlap         turns that ran at the same time as one of the other job

    python benchmarks/bench_fleet.py --json fleet.json
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence

import aiohttp
from lib.fleet.figures import switch_figure
from lib.fleet.rig import FleetRig
from lib.fleet.turns import FleetTurn, run
from lib.harness import run_benchmark

from rose.measure.figures import Figure

NUM_ENGINES, GPUS_EACH, TURNS_PER_GPU = 2, 8, 16
CHUNK_TOKENS, CHUNK_MS = 8, 250.0
NUM_STREAMS = 200
STREAM_TOKENS = 320
SHORT_MS, SHORT_TOKENS = 10.0, 16
NUM_SHORT, QUICK_SHORT = 100_000, 4_000
NUM_CLIENTS = 400
BETWEEN_KILLS_S = (2.0, 5.0)
BURST_TOKENS = 1600
JOBS = ("math", "code")
MEET_S = 2.0
"""For the routers to meet, and to divide the engines' turns."""


def measure(args: argparse.Namespace) -> list[Figure]:
    """Runs all phases, each with engines and routers of its own."""
    killed: list[FleetTurn] = []
    for number in range(1 if args.quick else 3):
        with FleetRig(NUM_ENGINES, GPUS_EACH, CHUNK_TOKENS, CHUNK_MS) as fleet:
            killed += asyncio.run(_kill_one(fleet, args.seed + number))
    with FleetRig(NUM_ENGINES, GPUS_EACH, SHORT_TOKENS // 2, SHORT_MS) as fleet:
        num_kills, short = asyncio.run(_many(fleet, args))
        peaks = fleet.peaks()
    with FleetRig(1, 1, SHORT_TOKENS // 2, SHORT_MS, "serving") as fleet:
        num_bursts = asyncio.run(_switch(fleet, args))
        ran = fleet.turns()
    return [*_kill_figures(killed), _cap_figure(peaks, num_kills, short), *_loan_figures(ran, num_bursts)]


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300.0)
    )


def _order(urls: Sequence[str], number: int) -> list[str]:
    return list(urls) if number % 2 == 0 else list(reversed(urls))


async def _kill_one(fleet: FleetRig, seed: int) -> list[FleetTurn]:
    """Kills the first router under streams. Returns the turns of all clients."""
    by_chance = random.Random(seed)
    await asyncio.sleep(MEET_S)
    async with _session() as http:
        turns = [
            FleetTurn([by_chance.randrange(900) for _ in range(16)], STREAM_TOKENS)
            for _ in range(NUM_STREAMS)
        ]
        running = [
            asyncio.create_task(run(http, _order(fleet.urls, number), turn))
            for number, turn in enumerate(turns)
        ]
        while not all(turn.token_ids or turn.error for turn in turns):
            await asyncio.sleep(0.05)
        await asyncio.sleep(by_chance.random())
        fleet.kill(0)
        return list(await asyncio.gather(*running))


async def _many(fleet: FleetRig, args: argparse.Namespace) -> tuple[int, list[FleetTurn]]:
    """Runs short turns while routers are killed and started again. Returns the kills and the turns."""
    by_chance, is_over = random.Random(args.seed), asyncio.Event()
    left, num_kills, done = iter(range(QUICK_SHORT if args.quick else NUM_SHORT)), 0, []

    async def client(http: aiohttp.ClientSession) -> None:
        for number in left:
            done.append(
                await run(http, _order(fleet.urls, number), FleetTurn([number % 900, 7], SHORT_TOKENS))
            )

    async def kill() -> None:
        nonlocal num_kills
        while not is_over.is_set():
            victim = by_chance.randrange(2)
            await asyncio.sleep(by_chance.uniform(*BETWEEN_KILLS_S))
            fleet.kill(victim)
            num_kills += 1
            await asyncio.sleep(by_chance.random())
            await asyncio.to_thread(fleet.start, victim)

    async with _session() as http:
        killing = asyncio.create_task(kill())
        await asyncio.gather(*(client(http) for _ in range(NUM_CLIENTS)))
        is_over.set()
        await killing
    return num_kills, done


async def _switch(fleet: FleetRig, args: argparse.Namespace) -> int:
    """Runs bursts of turns of two jobs in turn. Each burst begins while the one before it runs."""
    by_chance, num_bursts = random.Random(args.seed), 8 if args.quick else 40
    before: list[asyncio.Task[FleetTurn]] = []
    async with _session() as http:
        for burst in range(num_bursts):
            turns = [FleetTurn([burst, 1], BURST_TOKENS, JOBS[burst % 2]) for _ in range(TURNS_PER_GPU)]
            url = fleet.urls[burst % 2]
            now = [asyncio.create_task(run(http, [url], turn)) for turn in turns]
            await asyncio.gather(*before)
            await asyncio.sleep(by_chance.random() / 2)
            before = now
        await asyncio.gather(*before)
    return num_bursts


def _kill_figures(turns: list[FleetTurn]) -> list[Figure]:
    failed = [turn for turn in turns if turn.error is not None or not turn.is_exact]
    for turn in failed[:5]:
        print(f"a turn failed: {turn.error or 'its tokens are not those of the engine'}")
    waits = [turn.waited_s - CHUNK_MS / 1000 for turn in turns if turn.reconnected and turn.waited_s]
    return [
        Figure(
            name="router_kill_failed",
            value=float(len(failed)),
            unit="turns",
            target="<= 0",
            peers={"turns": float(len(turns)), "reconnected": float(sum(t.reconnected for t in turns))},
        ),
        Figure(
            name="router_back_s",
            value=max(waits, default=None),
            unit="s",
            target="<= 1",
            spread=(min(waits), max(waits)) if waits else None,
        ),
    ]


def _cap_figure(peaks: list[dict[str, int]], num_kills: int, turns: list[FleetTurn]) -> Figure:
    cap = GPUS_EACH * TURNS_PER_GPU
    return Figure(
        name="over_cap",
        value=float(max(0, *(each["peak"] - cap for each in peaks))),
        unit="turns",
        target="<= 0",
        peers={
            "turns": float(sum(each["turns"] for each in peaks)),
            "kills of routers": float(num_kills),
            "refused by engines": float(sum(each["refused"] for each in peaks)),
            "peak of the cap": max(each["peak"] for each in peaks) / cap,
            "failed twice": float(sum(turn.error is not None for turn in turns)),
        },
    )


def _overlap(one: tuple[int, float, float], other: tuple[int, float, float]) -> bool:
    return one[0] % 2 != other[0] % 2 and one[1] < other[2] and other[1] < one[2]


def _loan_figures(ran: list[tuple[int, float, float]], num_bursts: int) -> list[Figure]:
    """`ran`: burst, begin and end of each turn."""
    spans = [
        (
            min(began for burst, began, _ in ran if burst == each),
            max(end for burst, _, end in ran if burst == each),
        )
        for each in range(num_bursts)
    ]
    return [
        switch_figure("lend_switch_s", spans),
        Figure(
            name="lend_overlap",
            value=float(sum(any(_overlap(one, other) for other in ran) for one in ran)),
            unit="turns",
            target="<= 0",
        ),
    ]


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
