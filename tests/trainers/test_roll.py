"""ROLL's real registry, batch, post-processing and environment worker, with ROSE's proxy among them."""

import asyncio
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.programs import told_by
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until
from tests.trainers.roll_program import MAX_TOKENS, NUM_EPISODES, NUM_TURNS

pytest.importorskip(
    "roll.pipeline.agentic.environment_worker",
    reason="ROLL is on no package index (CONTRIBUTING.md)",
)

pytestmark = pytest.mark.clients
EOS, PAD = 998, 999


def make_proxy(url: str) -> Any:
    from roll.pipeline.agentic.agentic_config import LLMProxyConfig
    from roll.pipeline.agentic.llm_proxy import create_llm_proxy

    import rose.trainers.roll  # noqa: F401

    given = {"router_url": url, "model": "scripted", "weights": {"relay_url": "embedded://relay:8400"}}
    config = LLMProxyConfig(proxy_type="rose", proxy_config=given)
    tokenizer: Any = SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD)
    return create_llm_proxy(None, config, tokenizer, None)


def ask(proxy: Any, *contents: str, **more: Any) -> Any:
    """One turn: a question, or a question, an answer and the next question."""
    import torch
    from roll.distributed.scheduler.protocol import DataProto

    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    tensors = {
        "input_ids": torch.tensor([[PAD, 1, 2]]),
        "attention_mask": torch.tensor([[0, 1, 1]]),
        "position_ids": torch.tensor([[0, 0, 1]]),
    }
    lm_input = DataProto.from_dict(tensors=tensors, meta_info={"src_rank": 5}, **more)
    return proxy.generate(messages, lm_input, {"max_new_tokens": 4, "temperature": 1.0})


async def test_rolls_registry_makes_a_proxy_whose_turns_go_to_the_router(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as routed:
        proxy = await asyncio.to_thread(make_proxy, routed.router.url)
        answer = await asyncio.to_thread(ask, proxy, "w1")
    tokens = expected_tokens([1, 2], 4)
    assert answer.batch["responses"][0].tolist() == tokens
    mask = answer.batch["response_mask"][0].bool()
    assert answer.batch["input_ids"][0][mask].tolist() == tokens
    logprobs = answer.batch["infer_logprobs"][0][mask[1:]].tolist()
    assert logprobs == pytest.approx([-token / 1000 for token in tokens])
    assert worker.requests[-1]["stop_token_ids"] == [EOS, PAD]


async def test_each_trajectory_is_a_session_and_takes_the_weights_of_its_time(
    start_router: StartRouter,
) -> None:
    async with (
        ScriptedWorker(version="run/2") as worker,
        start_router(worker, version_mode="pinned") as routed,
    ):
        proxy = await asyncio.to_thread(make_proxy, routed.router.url)
        sessions = routed.router.plane.trajectories.sessions
        await asyncio.to_thread(ask, proxy, "a")
        await asyncio.to_thread(ask, proxy, "a", "b", "c")
        assert len(sessions) == 1
        worker.version = "run/3"
        await until(lambda: str(routed.router.plane.registry.workers()[0].weight_version) == "run/3")
        await asyncio.to_thread(ask, proxy, "a")
        assert len(sessions) == 2
        await asyncio.to_thread(ask, proxy, "d")
        assert len(sessions) == 3


async def test_an_aborted_turn_is_none_and_is_asked_again_in_its_session(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as routed:
        proxy = await asyncio.to_thread(make_proxy, routed.router.url)
        worker.faults.append(Fault(kind="abort_plain", after_tokens=1))
        assert await asyncio.to_thread(ask, proxy, "a") is None
        assert await asyncio.to_thread(ask, proxy, "a") is not None
        assert len(routed.router.plane.trajectories.sessions) == 1


async def test_turns_of_several_threads_are_in_flight_together(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as routed:
        proxy = await asyncio.to_thread(make_proxy, routed.router.url)
        worker.hold()
        turns = [asyncio.create_task(asyncio.to_thread(ask, proxy, content)) for content in "ab"]
        await until(lambda: len(worker.requests) == 2)
        worker.go_on()
        answers = await asyncio.gather(*turns)
    assert all(answer is not None for answer in answers)


def test_images_are_refused() -> None:
    import numpy as np

    proxy = make_proxy("http://127.0.0.1:1")
    images = {"multi_modal_data": np.array([{"image": "an image"}], dtype=object)}
    with pytest.raises(ValueError, match="multi_modal_data"):
        ask(proxy, "a", non_tensors=images)


@pytest.mark.slow  # each of Ray's processes loads ROLL
async def test_rolls_environment_worker_plays_its_episodes_on_the_router(
    start_router: StartRouter, tmp_path: Path
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as routed:
        told = await run_program(routed.router.url, tmp_path)
        num_sessions = len(routed.router.plane.trajectories.sessions)
    assert len(told) == NUM_EPISODES == num_sessions
    for trajectory in told:
        answers = list(answer_spans(trajectory["response_mask"]))
        assert len(answers) == NUM_TURNS
        ids = trajectory["input_ids"]
        for begin, end in answers:
            assert ids[begin:end] == expected_tokens(ids[:begin], MAX_TOKENS)
            # The logprob of a token is at the place from which it was predicted.
            logprobs = trajectory["infer_logprobs"][begin - 1 : end - 1]
            assert logprobs == pytest.approx([-token / 1000 for token in ids[begin:end]])


def answer_spans(mask: list[int]) -> Iterator[tuple[int, int]]:
    position = 0
    for is_answer, run in groupby(mask):
        end = position + len(list(run))
        if is_answer:
            yield position, end
        position = end


async def run_program(url: str, folder: Path) -> Any:
    root = str(Path(__file__).parents[2])
    paths = [root, *(path for path in sys.path if path)]  # Ray's workers find ROLL where this process does
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return await told_by("tests.trainers.roll_program", url, str(folder), env=env, cwd=folder)
