"""Stops and kills an engine behind a peer router, for bench_failover.py.

Owns what is noted of it, and a peer's process: a new one for each fault. Promises that a stopped engine goes
on, also on an error. Never asks the peer: the turns tell what became of them.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from lib.faults.failover import begin_new_turns, failures
from lib.faults.signals import kill, stopped
from lib.faults.turns import RunningEngine, begin_turns
from lib.load.turns import PATIENCE_S, RouterClient, Turn, until
from lib.router.rig import other_router, peer_name

GIVE_UP_S = 20.0
"""So long after a SIGSTOP turns are waited for."""
HUNG_S = 10.0
"""A turn that had no token for this long hung."""


@dataclass(slots=True)
class PeerSamples:
    """What was found behind one peer."""

    spec: str
    silences_s: list[float] = field(default_factory=list)
    """For each turn at a SIGSTOP, the longest that it waited for a token or its end."""
    num_stopped: int = 0
    """Turns that ran on the engine that was stopped."""
    num_hung: int = 0
    """Turns that ran, on whatever engine."""
    num_new: int = 0
    num_new_hung: int = 0
    broken: list[str] = field(default_factory=list)
    """What ended turns before their time at a SIGSTOP."""
    num_turns: int = 0
    """The turns that ran on a peer's worker when it got a SIGKILL."""
    num_cut: int = 0
    failed: list[str] = field(default_factory=list)

    def beside(self) -> dict[str, dict[str, float | None]]:
        """Returns what stands beside ours, for each figure that the peer has."""
        name = peer_name(self.spec)
        return {
            "sigstop_reroute_s": {
                f"{name}, given up after {GIVE_UP_S:.0f}": max(self.silences_s),
                f"{name}, turns that hung": float(self.num_hung),
                f"{name}, turns on the stopped engine": float(self.num_stopped),
            },
            "sigstop_new_turns": {f"{name}, of {self.num_new}": float(self.num_new_hung)},
            "sigkill_failed_turns": {
                f"{name}, of {self.num_turns}": float(len(self.failed)),
                f"{name}, turns cut": float(self.num_cut),
            },
        }


async def stop_behind(engines: Sequence[RunningEngine], name: str, samples: PeerSamples) -> None:
    """Stops all processes of the first engine, for as long as turns are waited for."""
    victim = engines[0]
    async with _peer(samples.spec, engines) as client:
        turns, tasks = await begin_turns(client, victim, name)
        samples.num_stopped += victim.running_turns()
        with stopped(victim.pid) as stopped_s:
            new, new_tasks = await begin_new_turns(client, name)
            await _end([*tasks, *new_tasks], stopped_s + GIVE_UP_S, samples.broken)
    running, begun = [[_silence_s(turn, stopped_s) for turn in each] for each in (turns, new)]
    samples.silences_s += [*running, *begun]
    samples.num_hung += sum(silence_s > HUNG_S for silence_s in running)
    samples.num_new += len(new)
    samples.num_new_hung += sum(silence_s > HUNG_S for silence_s in begun)
    await until(lambda: not any(engine.running_turns() for engine in engines), "both engines are idle")


async def kill_behind(engines: Sequence[RunningEngine], name: str, samples: PeerSamples) -> None:
    """Kills all processes of the first engine."""
    victim, survivor = engines
    async with _peer(samples.spec, engines) as client:
        turns, tasks = await begin_turns(client, victim, name)
        samples.num_cut += victim.running_turns()
        await _end(tasks, kill(victim.pid) + PATIENCE_S, [])
    samples.num_turns += len(turns)
    samples.failed += await failures(survivor, turns)


@asynccontextmanager
async def _peer(spec: str, engines: Sequence[RunningEngine]) -> AsyncIterator[RouterClient]:
    # While it starts nothing else runs in this process.
    with other_router(spec, [engine.control.url for engine in engines]) as (url, _):
        async with RouterClient(url, engines[0].control.model) as client:
            yield client


async def _end(tasks: Sequence[asyncio.Task[Turn]], until_s: float, broken: list[str]) -> None:
    """Waits until then for the turns, and gives up those that have not ended."""
    ended, left = await asyncio.wait(tasks, timeout=until_s - time.monotonic())
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    turns = [task.result() for task in ended]
    broken += [turn.error or "no finish" for turn in turns if turn.finish_reason is None]


def _silence_s(turn: Turn, since_s: float) -> float:
    """The longest that it was without a token since then, or since its begin if that was later."""
    start_s = max(turn.sent_s, since_s)
    times = [start_s, *(at_s for at_s in turn.token_times_s if at_s > start_s), max(turn.ended_s, start_s)]
    return max(after - before for before, after in itertools.pairwise(times))
