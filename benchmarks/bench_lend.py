"""A GPU changes hands between two jobs with weights of their own within a second, and no turn gets the
other's.

Two trainers publish over one relay. One engine, which serves as a lent GPU, stands behind a router that knows
both jobs. The jobs send bursts of turns alternately, and each burst waits already when the one before it
ends. Each job's first burst is left out, because the host then fetches the job's run.

  lend_switch_s[weights]  from the last token of a job to the first token of the other, with the change of the
                          engine's weights
  stale_turns             turns that were answered with weights of another run than their job's, by the
                          answer's own word or by its tokens

    python benchmarks/bench_lend.py --json lend.json
"""

import argparse
import asyncio
import json
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from lib.fleet.figures import switch_figure
from lib.harness import run_benchmark

from rose.errors import WorkerError
from rose.measure.completions import open_session
from rose.measure.figures import Figure
from rose.measure.rig import Rig
from rose.node.control import completion_body
from rose.transfer.publish.publisher import WeightPublisher
from rose.types import Role

JOBS = ("math", "code")
BURSTS, QUICK_BURSTS = 40, 8
TURNS = 4
TURN_TOKENS = 40
PROMPTS = [[7 * turn + position for position in range(1, 30)] for turn in range(TURNS)]
RELAY_BYTES = 256 << 20
READY_S = 120.0


@dataclass
class LentTurn:
    """One answer, whose times are seconds of the monotonic clock."""

    job: str
    prompt: int
    first_s: float
    last_s: float
    tokens: list[int]
    versions: set[str]

    @property
    def is_stale(self) -> bool:
        return self.versions != {f"{self.job}-run/0"}


def publish(model: Path, relay_url: str, seed: int) -> list[WeightPublisher]:
    """Publishes a version of each job's run: weights of one shape, drawn anew for each."""
    import torch
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(seed)
    found = []
    for job in JOBS:
        weights = {
            name: tensor * (1 + 0.5 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
            for name, tensor in load_file(model / "model.safetensors").items()
        }
        found.append(WeightPublisher(weights, relay_url, f"{job}-run", dtype=None))
        found[-1].publish()
    return found


def measure(args: argparse.Namespace) -> list[Figure]:
    with Rig() as rig:
        _, relay_url = rig.start_relay("relay", capacity_bytes=RELAY_BYTES)
        rig.start_engine("engine", Role.ROLLOUT, relay=relay_url, staging=str(rig.folder / "staged"))
        engine = rig.wait_engine("engine")
        first, second = publish(rig.model(Role.ROLLOUT), relay_url, args.seed)
        with closing(first), closing(second):
            rig.start_subscriber("engine")
            settings = rig.folder / "router.yaml"
            jobs = {job: {"key": job, "run_id": f"{job}-run", "model": str(Role.ROLLOUT)} for job in JOBS}
            settings.write_text(json.dumps({"jobs": jobs}))  # JSON is YAML, too
            url = rig.start_router([f"{engine.url},serving"], str(settings))
            bursts = asyncio.run(run_bursts(url, QUICK_BURSTS if args.quick else BURSTS))
    return figures(bursts)


async def run_bursts(url: str, count: int) -> list[list[LentTurn]]:
    """Runs bursts of the jobs in turn. A burst is sent as soon as the one before it makes tokens."""
    running: list[asyncio.Task[list[LentTurn]]] = []
    async with open_session() as session:
        for burst in range(count):
            has_begun = asyncio.Event()
            running.append(asyncio.create_task(_burst(session, url, JOBS[burst % 2], has_begun)))
            async with asyncio.timeout(READY_S):
                await has_begun.wait()
        return await asyncio.gather(*running)


async def _burst(
    session: aiohttp.ClientSession, url: str, job: str, has_begun: asyncio.Event
) -> list[LentTurn]:
    return await asyncio.gather(*(_turn(session, url, job, prompt, has_begun) for prompt in range(TURNS)))


async def _turn(
    session: aiohttp.ClientSession, url: str, job: str, prompt: int, has_begun: asyncio.Event
) -> LentTurn:
    body = {**completion_body(str(Role.ROLLOUT), PROMPTS[prompt], TURN_TOKENS), "stream": True}
    turn = LentTurn(job, prompt, 0.0, 0.0, [], set())
    headers = {"Authorization": f"Bearer {job}"}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise WorkerError(f"a turn of {job} was answered {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = json.loads(line[len(b"data: ") :])
            for choice in event.get("choices", ()):
                turn.last_s = time.monotonic()
                turn.first_s = turn.first_s or turn.last_s
                turn.tokens += choice.get("token_ids") or ()
                spans = (choice.get("rose") or {}).get("spans", ())
                turn.versions |= {str(span["weight_version"]) for span in spans}
            has_begun.set()
    return turn


def figures(bursts: list[list[LentTurn]]) -> list[Figure]:
    spans = [
        (min(turn.first_s for turn in burst), max(turn.last_s for turn in burst)) for burst in bursts[1:]
    ]
    turns = [turn for burst in bursts for turn in burst]
    own: dict[tuple[str, int], list[int]] = {}
    stale = [turn for turn in turns if turn.is_stale]
    said_own = [turn for turn in turns if not turn.is_stale]  # tokens of others are no job's own
    stale += [
        turn for turn in said_own if own.setdefault((turn.job, turn.prompt), turn.tokens) != turn.tokens
    ]
    return [
        switch_figure("lend_switch_s[weights]", spans),
        Figure(
            name="stale_turns",
            value=float(len(stale)),
            unit="turns",
            target="<= 0",
            peers={"turns": float(len(turns))},
        ),
    ]


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
