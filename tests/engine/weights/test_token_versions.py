"""Each token of a turn that goes through updates is told as one of the weights that made it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from mirrored import Mirrored
from probes import prompt
from real_engine import RealEngine
from references import ModelDirs
from safetensors.torch import load_file

from rose.node.control import completion_body
from rose.types import Role
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VERSIONS = 4
FIRST_TOKEN = 20
MAX_TOKENS = 900
INTERVALS = (1, 2, 3, 5, 7, 16)


@pytest.fixture
def engine(engines_dir: Path, models: ModelDirs) -> Iterator[RealEngine]:
    engine = RealEngine(models.tied[0], Role.ROLLOUT, engines_dir)
    try:
        yield engine.wait_ready()
    finally:
        engine.stop()


def weights_of(model: Path, version: int) -> dict[str, torch.Tensor]:
    """Returns weights that answer every prompt with one token alone, which is the version's own."""
    tensors: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()  # so layers add nothing to the embedding
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    embedding = tensors["model.embed_tokens.weight"]
    embedding.fill_(1.0)
    embedding[FIRST_TOKEN + version] *= 2  # the head is tied to it
    return tensors


async def generated(engine: RealEngine) -> int:
    return (await asyncio.to_thread(engine.status)).generated_tokens


async def turn(http: aiohttp.ClientSession, url: str, number: int, interval: int) -> dict[str, Any]:
    body = completion_body("tiny", prompt(f"turn-{number}", 40), MAX_TOKENS)
    more = {"stream_interval": interval, "return_token_ids": True}
    async with http.post(f"{url}/v1/completions", json={**body, **more}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        choice: dict[str, Any] = answer["choices"][0]
        return choice


async def test_streams_of_any_interval_tell_the_version_of_each_token_across_updates(
    engine: RealEngine, models: ModelDirs, mirrored: Mirrored
) -> None:
    """An event that held tokens of two versions, or came after the router knew of the next one, would not."""

    def deliver(version: int) -> None:
        update = mirrored.put(weights_of(models.tied[0], version))
        response = engine.update_weights(update)
        assert response.status_code == 200, response.text

    async with (
        running_router(engine.url, heartbeat_s=0.1, lost_after_s=60) as router,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http,
    ):
        (worker,) = router.plane.registry.workers()
        await asyncio.to_thread(deliver, 0)
        await until(lambda: worker.is_alive and str(worker.weight_version) == "test/0")
        await turn(http, router.url, -1, 1)  # the router measures a step, and asks for intervals from now on
        turns = [
            asyncio.create_task(turn(http, router.url, number, interval))
            for number, interval in enumerate(INTERVALS)
        ]
        for version in range(1, VERSIONS):
            made = await generated(engine)
            while await generated(engine) < made + 20 * len(turns):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(deliver, version)
        choices = await asyncio.gather(*turns)
    for choice in choices:
        assert len(choice["token_ids"]) == MAX_TOKENS
        told = [span["weight_version"] for span in choice["rose"]["spans"] for _ in range(span["tokens"])]
        assert told == [f"test/{token - FIRST_TOKEN}" for token in choice["token_ids"]]
        assert len(set(told)) > 1
    assert engine.status().weights_in_place == VERSIONS - 1
