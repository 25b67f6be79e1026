"""SkyRL's unmodified RemoteInferenceClient on a router before a real engine."""

from typing import Any

import pytest

from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.stock_worker import SERVED_MODEL

remote: Any = pytest.importorskip(
    "skyrl.backends.skyrl_train.inference_servers.remote_inference_client",
    reason="SkyRL is not installed (CONTRIBUTING.md)",
)

pytestmark = [pytest.mark.vllm, pytest.mark.clients]


async def test_the_skyrl_client_gets_ids_logprobs_and_text_for_each_session(engine_url: str) -> None:
    async with running_router(engine_url) as router:
        client = remote.RemoteInferenceClient(
            proxy_url=router.url, server_urls=[engine_url], data_parallel_size=1, model_name=SERVED_MODEL
        )
        sampling = {"max_tokens": 6, "temperature": 0.0, "logprobs": 1, "ignore_eos": True}
        batch = {"prompt_token_ids": [[5, 6, 7], [8, 9]], "sampling_params": sampling}
        output = await client.generate({**batch, "session_ids": ["a", "b"]})
        again = await client.generate({**batch, "session_ids": ["a", "b"]})
        body = {"model": SERVED_MODEL, "messages": [{"role": "user", "content": "w9"}], "max_tokens": 4}
        chat = await client.chat_completion({"json": {**body, "session_id": "a"}})
        sessions = len(router.plane.trajectories.sessions)
        await client.finish_session("b")
        left = len(router.plane.trajectories.sessions)
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        asked = {"prompt": prompt, "num_samples": 2, "sampling_params": {"max_tokens": 6, "temperature": 0.0}}
        sampled = await client.sample({"json": {**asked, "session_id": "c"}})
        await client.teardown()
    assert [len(ids) for ids in output["response_ids"]] == [6, 6]
    assert [len(logprobs) for logprobs in output["response_logprobs"]] == [6, 6]
    assert all(text.startswith("w") for text in output["responses"])
    assert output["stop_reasons"] == ["length", "length"]
    assert again["response_ids"] == output["response_ids"]
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert sessions == 2 and left == 1
    assert len(sampled["sequences"]) == 2
    assert all(len(each["logprobs"]) == len(each["tokens"]) for each in sampled["sequences"])
