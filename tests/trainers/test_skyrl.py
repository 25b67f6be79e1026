"""SkyRL's real client class and configuration, with ROSE's in their place."""

import pickle
from typing import Any

import pytest

from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens

pytest.importorskip("skyrl.train.config", reason="SkyRL is not installed (CONTRIBUTING.md)")
pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed (CONTRIBUTING.md)")

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def entry() -> Any:
    from tests.trainers.whole.skyrl_cpu import stand_in_for_flash_attn

    stand_in_for_flash_attn()
    from rose.trainers import skyrl

    return skyrl


async def test_skyrls_client_class_sends_a_jobs_turns_with_its_key(
    entry: Any, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_ROUTER_API_KEY", "secret")
    async with ScriptedWorker() as worker, start_router(worker, api_key="secret") as routed:
        url = routed.router.url
        made = entry.RouterInferenceClient(url, [url], 1, "scripted", job="default")
        client = pickle.loads(pickle.dumps(made))  # as SkyRL hands it to its workers
        batch = {"prompt_token_ids": [[1, 2]], "sampling_params": {"max_tokens": 4}, "session_ids": ["a"]}
        raw = await client._generate_single([1, 2], batch["sampling_params"], "a", "scripted")
        await client.pause_generation()
        await client.reset_prefix_cache()
        await client.resume_generation()
        await client.teardown()
    assert raw["response_ids"] == expected_tokens([1, 2], 4)
    assert len(worker.requests) == 1


RELAY = {"generator.inference_engine.rose.weights.relay_url": "embedded://127.0.0.1:1"}
ROUTER = {"generator.inference_engine.external_proxy_url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (ROUTER, r"generator\.inference_engine\.rose\.weights\.relay_url: missing"),
        ({**ROUTER, **RELAY, "generator.inference_engine.rose.jobs": "a"}, "jobs: unknown"),
        ({**ROUTER, **RELAY, "trainer.strategy": "megatron"}, r"trainer\.strategy=megatron: must be fsdp"),
        ({**ROUTER, **RELAY, "trainer.policy.model.lora.rank": 8}, r"lora\.rank=8: must be 0"),
        (
            {**ROUTER, **RELAY, "generator.inference_engine.enable_return_routed_experts": True},
            r"enable_return_routed_experts: must be false",
        ),
    ],
)
def test_what_a_router_cannot_do_is_refused_with_the_key(
    entry: Any, given: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        entry._check(entry.RouterTrainConfig.from_cli_overrides(given))


def test_the_routers_of_the_job_scheduler_are_the_default(
    entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_ROUTER_URL", "http://one:1,http://two:2")
    config = entry.RouterTrainConfig.from_cli_overrides(RELAY)
    entry._check(config)
    assert config.generator.inference_engine.external_proxy_url == "http://one:1,http://two:2"
