"""ROLL's real registry, batch and post-processing, with ROSE's proxy among them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens

pytest.importorskip("roll.pipeline.agentic.llm_proxy", reason="ROLL is on no package index")


@pytest.mark.asyncio
async def test_rolls_registry_makes_a_proxy_whose_turns_go_to_the_router(start_router: StartRouter) -> None:
    import torch
    from roll.distributed.scheduler.protocol import DataProto
    from roll.pipeline.agentic.agentic_config import LLMProxyConfig
    from roll.pipeline.agentic.llm_proxy import create_llm_proxy

    import rose.trainers.roll  # noqa: F401

    def play(url: str) -> Any:
        config = LLMProxyConfig(proxy_type="rose", proxy_config={"router_url": url, "model": "scripted"})
        tokenizer: Any = SimpleNamespace(eos_token_id=990, pad_token_id=991)
        proxy = create_llm_proxy(None, config, tokenizer, None)
        tensors = {
            "input_ids": torch.tensor([[991, 1, 2]]),
            "attention_mask": torch.tensor([[0, 1, 1]]),
            "position_ids": torch.tensor([[0, 0, 1]]),
        }
        lm_input = DataProto.from_dict(tensors=tensors, meta_info={"src_rank": 5})
        return proxy.generate([], lm_input, {"max_new_tokens": 4, "temperature": 1.0})

    async with ScriptedWorker() as worker, start_router(worker) as routed:
        answer = await asyncio.to_thread(play, routed.router.url)
        assert routed.router.plane.trajectories.sessions.get("roll-5", "scripted") is not None
    tokens = expected_tokens([1, 2], 4)
    assert answer.batch["responses"][0].tolist()[:4] == tokens
    mask = answer.batch["response_mask"][0].bool()
    assert answer.batch["input_ids"][0][mask].tolist() == tokens
