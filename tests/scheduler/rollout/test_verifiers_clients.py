"""prime verifiers' unmodified eval and train clients on a router before a real engine."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rose.scheduler.rollout.http.command import RunningRouter
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.stock_worker import SERVED_MODEL, StockWorker

clients: Any = pytest.importorskip(
    "verifiers.v1.clients", reason="verifiers is not installed (CONTRIBUTING.md)"
)

pytestmark = [pytest.mark.vllm, pytest.mark.clients]

BODY = {"model": SERVED_MODEL, "messages": [{"role": "user", "content": "w9 w10"}], "ignore_eos": True}
SESSION = "trajectory-1"


@pytest.fixture
async def router(engine_url: str) -> AsyncIterator[RunningRouter]:
    async with running_router(engine_url) as router:
        yield router


async def test_the_eval_client_gets_its_chat_answer(router: RunningRouter) -> None:
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    config = EvalClientConfig(base_url=f"{router.url}/v1", api_key_var="NO_SUCH_KEY")
    client = EvalClient(config)
    body = {**BODY, "max_tokens": 6, "temperature": 0.0}
    response = await client.get_response(ChatDialect(), body, SamplingConfig(), session_id=SESSION)
    await client.close()
    assert response.message.content
    assert response.usage is not None and response.usage.completion_tokens == 6
    assert response.finish_reason == "length"
    assert router.plane.trajectories.sessions.get(SESSION, SERVED_MODEL) is not None


async def test_the_train_client_gets_ids_and_logprobs_turn_by_turn(
    router: RunningRouter, engine: StockWorker
) -> None:
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    config = TrainClientConfig(
        base_url=f"{router.url}/v1", api_key_var="NO_SUCH_KEY", renderer_model_name=str(engine.model)
    )
    client = TrainClient(config)
    sampling = SamplingConfig.model_validate({"max_tokens": 6, "temperature": 0.0, "ignore_eos": True})
    for content in ("w9 w10", "w11 w12 w13"):
        body = {"model": SERVED_MODEL, "messages": [{"role": "user", "content": content}]}
        response = await client.get_response(ChatDialect(), body, sampling, session_id=SESSION)
        assert response.tokens is not None
        assert len(response.tokens.completion_ids) == 6 == len(response.tokens.completion_logprobs)
        assert all(logprob <= 0 for logprob in response.tokens.completion_logprobs)
    await client.close()
    assert len(router.plane.trajectories.sessions) == 1
