"""Tool-using agents finish their turns while workers are killed and stopped: on two real engines.

Two rollout engines with the same weights in float32 stand behind `rose router --front 1`. Agents talk to it
in conversations of ten turns: tools (auto and required), reasoning, an expression, a schema, stop strings,
penalties. What tools and users say has 150 to 600 tokens, and answers have up to 250, so a conversation grows
to thousands of tokens. Half of the agents stream their answers.
Meanwhile one engine or the other, by chance, gets SIGSTOP for some seconds, or SIGKILL, after which a new one
takes its place. Afterwards an undisturbed engine is asked every turn again.

  agent_failed        turns that ended with an error
  agent_lost_tokens   tokens that a killed engine had made and the router never got, per turn on it: the most
  agent_equal         share of turns whose text, tool calls, reasoning and finish equal the engine's own

    python benchmarks/bench_agents.py --json agents.json
"""

import argparse
import asyncio
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from lib.faults.signals import kill, stopped
from lib.faults.turns import RunningEngine, is_idle
from lib.harness import run_benchmark
from lib.load.agents import CONTEXT_TOKENS, Agent, AgentTurn, ask
from lib.load.turns import RouterClient, until_so

from rose.errors import WorkerError
from rose.measure.figures import Figure
from rose.measure.rig import Rig
from rose.types import GateMode, Role

PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
MODEL = str(Role.ROLLOUT)
NUM_AGENTS = 6
MODEL_S = 600.0
FRONT_S = 600.0
STOPPED_S = 6.0
BETWEEN_S = (4.0, 12.0)


@dataclass(slots=True)
class Found:
    """What the faults did."""

    agents: list[Agent] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    lost_per_turn: list[float] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    """What the router counted."""

    def asked(self) -> list[AgentTurn]:
        return [turn for agent in self.agents for turn in agent.turns]


def measure(args: argparse.Namespace) -> list[Figure]:
    """Plays all agents through all faults."""
    found = Found([Agent(f"agent-{at}", is_streaming=at % 2 == 1) for at in range(NUM_AGENTS)])
    with Rig() as rig:
        model = rig.folder / "scripted"
        made = rig.run(["-m", "rose.measure.scripted", str(model)], "model")
        if made.wait(MODEL_S) != 0:
            raise WorkerError(f"the model could not be made:\n{made.log_tail()}")
        workers = _Workers(rig, model)
        for name in ("a", "b"):
            workers.start(name)
        for name in ("a", "b"):
            workers.wait(name)
        urls = [engine.control.url for engine in workers.engines]
        url = rig.start_router(urls, "--front", "1", behind=("--", "--model", str(model), *PARSERS))
        asyncio.run(_play(args, url, workers, found))
    return _figures(found)


class _Workers:
    """The two engines, of which a killed one is replaced."""

    def __init__(self, rig: Rig, model: Path) -> None:
        self._rig = rig
        self._model = model
        self.engines: list[RunningEngine] = []

    def start(self, name: str) -> None:
        flags = (*PARSERS, "--served-model-name", MODEL, "--max-model-len", str(CONTEXT_TOKENS))
        self._rig.start_engine(name, Role.ROLLOUT, model=self._model, vllm_args=flags, gate=GateMode.OFF)

    def wait(self, name: str) -> RunningEngine:
        control = self._rig.wait_engine(name)
        engine = RunningEngine(control=control, engine_id=control.status().engine_id, pid=self._rig.pid(name))
        self.engines.append(engine)
        return engine


async def _play(args: argparse.Namespace, url: str, workers: _Workers, found: Found) -> None:
    by_chance = random.Random(args.seed)
    faults = (
        ["stop", "kill", "stop"] if args.quick else ["stop", "kill", "stop", "kill", "stop", "stop", "kill"]
    )
    async with RouterClient(url, MODEL) as client, aiohttp.ClientSession() as http:
        for engine in workers.engines:
            await until_so(lambda e=engine: is_idle(client, e), f"{engine.id} is there")  # type: ignore[misc]
        await until_so(lambda: _has_front(http, url), "the front answers", at_most_s=FRONT_S)
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for agent in found.agents:
                group.create_task(agent.play(http, url, MODEL, is_over))
            for number, fault in enumerate(faults):
                await asyncio.sleep(by_chance.uniform(*BETWEEN_S))
                victim = by_chance.choice(workers.engines)
                if fault == "stop":
                    with stopped(victim.pid):
                        await asyncio.sleep(STOPPED_S)
                else:
                    await _kill(client, workers, victim, f"k{number}", found)
            await asyncio.sleep(BETWEEN_S[0])
            is_over.set()
        counters = (await client.status())["counters"]
        found.counters = {name: float(counters[name]) for name in ("resumed", "restarted")}
        await _compare(http, workers.engines[0].control.url, found)


async def _has_front(http: aiohttp.ClientSession, url: str) -> bool:
    async with http.get(f"{url}/health") as response:
        return bool((await response.json())["fronts"])


async def _kill(
    client: RouterClient, workers: _Workers, victim: RunningEngine, name: str, found: Found
) -> None:
    """Kills an engine in the midst of turns; a new one takes its place."""
    running: list[int] = []
    await until_so(lambda: _is_busy(client, victim, running), f"{victim.id} runs turns")
    kill(victim.pid)
    await until_so(lambda: _is_lost(client, victim), f"{victim.id} is lost")
    num_lost = victim.generated_tokens() - (await client.worker(victim.id))["tokens"]
    found.lost_per_turn.append(max(0, num_lost) / running[-1])
    await client.remove(victim.id)
    workers.engines.remove(victim)
    workers.start(name)
    engine = await asyncio.to_thread(workers.wait, name)
    await client.add(engine.control.url)


async def _is_busy(client: RouterClient, engine: RunningEngine, running: list[int]) -> bool:
    """Whether turns run on an engine; adds how many to ``running``."""
    worker = await client.worker(engine.id)
    running.append(worker["in_flight"])
    return bool(worker["alive"]) and worker["in_flight"] > 0


async def _is_lost(client: RouterClient, engine: RunningEngine) -> bool:
    return not (await client.worker(engine.id))["alive"]


async def _compare(http: aiohttp.ClientSession, engine_url: str, found: Found) -> None:
    """Asks an engine every turn again, some at a time."""
    limit = asyncio.Semaphore(NUM_AGENTS)

    async def compare(turn: AgentTurn) -> None:
        again = AgentTurn(turn.body)
        async with limit:
            await ask(http, engine_url, again, {})
        if again.said is None:
            raise WorkerError(f"the engine itself did not answer: {again.error}")
        found.equal.append(again.said == turn.said)
        if turn.said is not None and again.said != turn.said:
            print(f"differs: {turn.said} is not {again.said}")

    await asyncio.gather(*(compare(turn) for turn in found.asked()))


def _figures(found: Found) -> list[Figure]:
    turns = found.asked()
    failed = [turn.error for turn in turns if turn.error is not None]
    for error in failed:
        print(f"a turn failed: {error}")
    return [
        Figure(
            name="agent_failed",
            value=float(len(failed)),
            unit="turns",
            target="<= 0",
            peers={"turns": len(turns), "kills": len(found.lost_per_turn), **found.counters},
        ),
        Figure(
            name="agent_lost_tokens",
            value=max(found.lost_per_turn),
            unit="tokens",
            target="<= 16",
            spread=(min(found.lost_per_turn), max(found.lost_per_turn)),
        ),
        Figure(
            name="agent_equal",
            value=sum(found.equal) / len(found.equal),
            unit="of turns",
            target=">= 1",
            peers={"turns": len(found.equal)},
        ),
    ]


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
