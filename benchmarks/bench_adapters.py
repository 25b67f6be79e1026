"""A new version of a LoRA adapter is used one step after it has come, and no turn gets a wrong version.

A trainer publishes versions of one adapter over a relay to an engine that makes tokens all the time, for
turns of the adapter through a router. Two contents take turns, and the tokens of each turn show which it had.
  lora_flip_ms[engine]  from a version's arrival on the host to the first token that it makes, without one
                        step of the engine, for turns that are sent to the engine
  lora_flip_ms[router]  the same, for turns that are sent to the router
  lora_stale            turns with tokens of another version than their answer names, and turns that were sent
                        after a version was acknowledged and got an older one

    python benchmarks/bench_adapters.py --quick --json adapters.json
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from lib.harness import median_figure, run_benchmark

from rose.errors import WorkerError
from rose.measure.completions import open_session
from rose.measure.figures import Figure
from rose.measure.rig import Rig
from rose.messages import parse_version
from rose.node.control import EngineControl, completion_body
from rose.transfer.adapters.publisher import AdapterPublisher
from rose.transfer.format.checkpoint import read_checkpoint
from rose.transfer.format.manifest import worker_name
from rose.types import Role

RUN = "math"
RANK = 8
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
VERSIONS, QUICK_VERSIONS = 20, 6
EVERY_S = 3.0
"""Longer than an old version stays loaded."""
PROMPTS = [[7 * turn + position for position in range(1, 30)] for turn in range(4)]
TURN_TOKENS = 60
RELAY_BYTES = 256 << 20
WAIT_S = 120.0


@dataclass
class AdapterTurn:
    """One answer."""

    prompt: int
    sent_s: float
    ended_s: float
    version: int
    tokens: list[int]


@dataclass
class Flip:
    """One version's times, in seconds of the monotonic clock."""

    published_s: float
    staged_s: float = 0.0
    acked_s: float = 0.0


@dataclass
class AdapterSamples:
    """What was seen."""

    expected: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """What is expected, by the version's parity and the prompt."""
    turns: list[AdapterTurn] = field(default_factory=list)
    first_s: dict[str, dict[int, float]] = field(default_factory=lambda: {"engine": {}, "router": {}})
    """When the first token of each version came, by where its turn was sent."""
    flips: dict[int, Flip] = field(default_factory=dict)
    step_s: float = 0.0


class AdapterTrainer:
    """Publishes the adapter, whose contents take turns."""

    def __init__(self, model: Path, base: str, relay_url: str, seed: int) -> None:
        import torch

        torch.manual_seed(seed)
        shapes = [
            (spec.name.removesuffix(".weight"), spec.shape)
            for spec, _ in read_checkpoint(model / "model.safetensors").values()
            if spec.name.removesuffix(".weight").rpartition(".")[2] in TARGETS
        ]
        self._contents = [
            {
                f"base_model.model.{module}.lora_{side}.weight": torch.randn(shape) * 0.3
                for module, (outputs, inputs) in shapes
                for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
            }
            for _ in range(2)
        ]
        self._tensors = {name: tensor.clone() for name, tensor in self._contents[0].items()}
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(TARGETS)}
        self._publisher = AdapterPublisher(
            self._tensors, relay_url, RUN, config=config, base=base, dtype="float32"
        )
        self.close = self._publisher.close

    def publish(self, number: int) -> None:
        for name, tensor in self._contents[number % 2].items():
            self._tensors[name].copy_(tensor)
        version = self._publisher.publish().version
        assert version.number == number

    def wait_acked(self, number: int, worker: str) -> None:
        version = parse_version(f"{RUN}/{number}")
        assert version is not None
        self._publisher.wait_acked(version, [worker], WAIT_S)


def measure(args: argparse.Namespace) -> list[Figure]:
    with Rig() as rig:
        _, relay_url = rig.start_relay("relay", capacity_bytes=RELAY_BYTES)
        staging = rig.folder / "staged"
        lora = ("--enable-lora", "--max-loras", "7", "--max-lora-rank", str(RANK))
        rig.start_engine(
            "engine", Role.ROLLOUT, vllm_args=lora, relay=relay_url, adapters=(RUN,), staging=str(staging)
        )
        engine = rig.wait_engine("engine")
        rig.start_subscriber("engine")
        router_url = rig.start_router([engine.url])
        folder = staging / f"adapters-{rig.config('engine').port}" / RUN
        trainer = AdapterTrainer(rig.model(Role.ROLLOUT), str(Role.ROLLOUT), relay_url, args.seed)
        with closing(trainer):
            count = QUICK_VERSIONS if args.quick else VERSIONS
            run = asyncio.run(run_versions(trainer, engine, router_url, folder, count))
    return figures(run)


async def run_versions(
    trainer: AdapterTrainer, engine: EngineControl, router_url: str, folder: Path, count: int
) -> AdapterSamples:
    run = AdapterSamples()
    async with open_session() as session:
        for number in range(2):
            await publish(trainer, engine, folder, number)
            for prompt in range(len(PROMPTS)):
                turn = await ask(session, router_url, prompt, TURN_TOKENS)
                if turn.version != number:
                    raise WorkerError(f"after {RUN}/{number} was acknowledged, a turn got {turn.version}")
                run.expected[number % 2, prompt] = turn.tokens
        if run.expected[0, 0] == run.expected[1, 0]:
            raise WorkerError("both contents of the adapter give the same tokens")
        async with loaded(session, engine.url, router_url, run):
            before = await asyncio.to_thread(engine.status)
            for number in range(2, 2 + count):
                run.flips[number] = await publish(trainer, engine, folder, number)
                await asyncio.sleep(EVERY_S)
            after = await asyncio.to_thread(engine.status)
    run.step_s = (after.busy_s - before.busy_s) / (after.steps - before.steps)
    return run


async def publish(trainer: AdapterTrainer, engine: EngineControl, folder: Path, number: int) -> Flip:
    """Publishes a version, and returns when the engine has acknowledged it."""
    flip = Flip(published_s=time.monotonic())
    staged = asyncio.create_task(staged_at(folder / f"{RUN}@{number}"))
    await asyncio.to_thread(trainer.publish, number)
    await asyncio.to_thread(trainer.wait_acked, number, worker_name(engine.url))
    flip.acked_s, flip.staged_s = time.monotonic(), await staged
    return flip


async def staged_at(path: Path) -> float:
    """Returns when the version has come to the host, decoded and checked."""
    async with asyncio.timeout(WAIT_S):
        while not path.exists():
            await asyncio.sleep(0.001)
    return time.monotonic()


@asynccontextmanager
async def loaded(
    session: aiohttp.ClientSession, engine_url: str, router_url: str, run: AdapterSamples
) -> AsyncIterator[None]:
    """Turns that follow each other without a pause: long ones, and short ones that look for new versions."""
    tasks = [asyncio.create_task(long_turns(session, router_url, each, run)) for each in range(len(PROMPTS))]
    for name, url in (("engine", engine_url), ("router", router_url)):
        tasks.append(asyncio.create_task(short_turns(session, url, run.first_s[name])))
    try:
        yield
        for task in [task for task in tasks if task.done()]:
            task.result()  # it failed: turns go on for ever
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def long_turns(session: aiohttp.ClientSession, url: str, prompt: int, run: AdapterSamples) -> None:
    while True:
        run.turns.append(await ask(session, url, prompt, TURN_TOKENS))


async def short_turns(session: aiohttp.ClientSession, url: str, first_s: dict[int, float]) -> None:
    while True:
        turn = await ask(session, url, 0, 1)
        first_s.setdefault(turn.version, turn.ended_s)


async def ask(session: aiohttp.ClientSession, url: str, prompt: int, max_tokens: int) -> AdapterTurn:
    """Raises: WorkerError unless one version made the whole answer."""
    body = {**completion_body(RUN, PROMPTS[prompt], max_tokens), "return_token_ids": True}
    sent_s = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer: Mapping[str, Any] = await response.json()
        if response.status != 200:
            raise WorkerError(f"{url} answered {response.status}: {answer}")
    ended_s, choice = time.monotonic(), answer["choices"][0]
    # An engine names the version as the model, and the router in the spans.
    spans = choice.get("rose", {}).get("spans", [])
    versions = {span["weight_version"] for span in spans} or {answer["model"].replace("@", "/")}
    version = parse_version(versions.pop())
    if versions or version is None or version.run_id != RUN:
        raise WorkerError(f"{url} answered with {answer['model']} and {spans}, not with one version of {RUN}")
    return AdapterTurn(prompt, sent_s, ended_s, version.number, choice["token_ids"])


def num_stale(run: AdapterSamples) -> int:
    stale = 0
    for turn in run.turns:
        is_wrong = turn.tokens != run.expected[turn.version % 2, turn.prompt]
        acked = max((number for number, flip in run.flips.items() if flip.acked_s < turn.sent_s), default=0)
        stale += is_wrong or turn.version < acked
    return stale


def figures(run: AdapterSamples) -> list[Figure]:
    found = []
    transfers = [1000 * (flip.staged_s - flip.published_s) for flip in run.flips.values()]
    for name, first_s in run.first_s.items():
        used = [1000 * (first_s[number] - flip.staged_s) for number, flip in run.flips.items()]
        parts = {"one step": 1000 * run.step_s, "transfer": statistics.median(transfers)}
        beyond = [each - parts["one step"] for each in used]
        found.append(median_figure(f"lora_flip_ms[{name}]", beyond, "ms", target="<= 50", peers={**parts}))
    peers: dict[str, float | None] = {"turns": float(len(run.turns)), "versions": float(len(run.flips))}
    found.append(
        Figure(
            name="lora_stale",
            value=float(num_stale(run)),
            unit="turns",
            target="<= 0",
            kind="measured",
            peers=peers,
        )
    )
    return found


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
