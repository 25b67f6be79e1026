"""verl's real client and manager classes, with ROSE's in their place."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens
from tests.transfer.relay_process import RelayProcess

pytest.importorskip("verl.workers.rollout.llm_server", reason="verl is not installed (CONTRIBUTING.md)")
pytest.importorskip("verl.experimental.agent_loop", reason="verl's agent loops can't be loaded here")

pytestmark = pytest.mark.clients


def verl_config(rose: dict[str, str] | None) -> Any:
    from omegaconf import OmegaConf

    custom = {"rose": rose} if rose is not None else None
    rollout = {"name": "vllm", "prompt_length": 8, "response_length": 4, "custom": custom}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {}}})


async def test_verls_client_class_sends_a_trajectorys_turns_to_the_router(start_router: StartRouter) -> None:
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    from rose.trainers.verl import RouterLLMClient

    async with ScriptedWorker(version="run/3") as worker:
        worker.faults.append(Fault(kind="disconnect", after_tokens=1))
        async with start_router(worker) as routed:
            config = verl_config({"router_url": routed.router.url, "model": "scripted"})
            client = pickle.loads(pickle.dumps(RouterLLMClient(config)))  # as verl hands it to its workers
            assert isinstance(client, LLMServerClient)
            sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
            output = await client.generate("trajectory-1", prompt_ids=[1, 2], sampling_params=sampling)
            again = [1, 2, *output.token_ids, 9, 9]
            second = await client.generate("trajectory-1", prompt_ids=again, sampling_params={})
            assert len(routed.router.plane.trajectories.sessions) == 1
    assert isinstance(output, TokenOutput)
    assert output.token_ids == expected_tokens([1, 2], 4)
    assert output.log_probs == [-token / 1000 for token in output.token_ids]
    assert output.stop_reason == "completed"
    assert output.extra_fields["max_global_steps"] == 3
    assert second.token_ids == expected_tokens(again, 4)
    assert second.log_probs is None


async def test_verl_gets_the_routed_experts_of_a_turn_that_was_cut(start_router: StartRouter) -> None:
    from rose.trainers.verl import RouterLLMClient

    async with ScriptedWorker(tells_experts=True) as worker:
        worker.faults.append(Fault(kind="disconnect", after_tokens=1))
        async with start_router(worker) as routed:
            config = verl_config({"router_url": routed.router.url, "model": "scripted"})
            output = await RouterLLMClient(config).generate("t", prompt_ids=[1, 2], sampling_params={})
    processed = [1, 2, *expected_tokens([1, 2], 4)][:-1]
    assert output.routed_experts[:, :, 0].tolist() == [[token, at] for at, token in enumerate(processed)]


async def test_media_and_a_missing_router_are_refused_with_the_key() -> None:
    from rose.trainers.verl import RouterLLMClient

    with pytest.raises(ValueError, match=r"rollout\.custom\.rose: missing"):
        RouterLLMClient(verl_config(None))
    client = RouterLLMClient(verl_config({"router_url": "http://127.0.0.1:1", "model": "m"}))
    with pytest.raises(ValueError, match="image_data"):
        await client.generate("t", prompt_ids=[1], sampling_params={}, image_data=["an image"])


def test_verls_manager_gives_its_loops_the_routers_client() -> None:
    from verl.experimental.agent_loop import AgentLoopManager

    from rose.trainers.verl import RouterAgentLoopManager, RouterLLMClient

    config = verl_config({"router_url": "http://127.0.0.1:1", "model": "m"})
    manager = RouterAgentLoopManager(config, llm_client=None)
    assert isinstance(manager, AgentLoopManager)
    assert isinstance(manager.llm_client, RouterLLMClient)


def verl_rollout(
    checkpoint: Path | None = None, /, router: Mapping[str, str] | None = None, **weights: Any
) -> Any:
    from rose.trainers.verl import RelayRollout

    config = SimpleNamespace(custom={"rose": {**(router or {}), "weights": weights}})
    model = SimpleNamespace(share_embeddings_and_output_weights=False, local_path=checkpoint)
    return RelayRollout(config, model, None)


async def test_an_adapter_alone_and_a_missing_relay_are_refused_with_the_key() -> None:
    with pytest.raises(ValueError, match=r"rollout\.custom\.rose\.weights\.relay_url: missing"):
        verl_rollout()
    rollout = verl_rollout(relay_url="embedded://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"set actor_rollout_ref\.model\.lora\.merge=True"):
        await rollout.update_weights(iter(()), peft_config=object(), global_steps=1)


async def test_nothing_is_published_when_verl_wakes_its_servers() -> None:
    """The relay is not there, so a publish would fail."""
    rollout = verl_rollout(relay_url="embedded://127.0.0.1:1")
    await rollout.resume(["weights"])
    await rollout.update_weights(iter(()), global_steps=None)
    await rollout.release()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process as torch's only rank."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'world'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
async def test_a_run_without_a_name_leaves_the_trainers_random_numbers_alone() -> None:
    relay = RelayProcess("embedded")
    rollout = verl_rollout(relay_url=relay.url)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    await rollout.update_weights(iter([("a", torch.ones(4, 4))]), global_steps=0)
    assert torch.equal(torch.rand(3), expected)
    assert rollout._weights.publisher is not None
    rollout._weights.publisher.close()
    relay.stop()


@pytest.mark.usefixtures("alone")
async def test_the_router_of_the_settings_is_told_of_each_version(start_router: StartRouter) -> None:
    relay = RelayProcess("embedded")
    jobs = {"math": {"key": "secret", "run_id": "run"}}
    async with ScriptedWorker() as worker, start_router(worker, jobs=jobs) as routed:
        router = {"router_url": routed.router.url, "key": "secret"}
        rollout = verl_rollout(router=router, relay_url=relay.url, run_id="run")
        for number in range(2):
            weights = iter([("a", torch.full((4, 4), float(number)))])
            await asyncio.to_thread(asyncio.run, rollout.update_weights(weights, global_steps=number))
            assert routed.router.plane.registry.newest.bound("run") == number
        rollout._weights.publisher.close()
    relay.stop()


@pytest.mark.usefixtures("alone")
async def test_what_verls_checkpoint_has_in_float32_is_published_in_float32(tmp_path: Path) -> None:
    """verl hands out its master weights, which are all float32."""
    weights = {"a": torch.randn(4, 4), "decay": torch.randn(4)}
    save_file({**weights, "a": weights["a"].bfloat16()}, tmp_path / "model.safetensors")
    relay = RelayProcess("embedded")
    for given, expected in (
        ({}, ["BF16", "F32"]),
        ({"dtype": "bfloat16"}, ["BF16", "BF16"]),
        ({"dtype": None}, ["F32", "F32"]),
    ):
        rollout = verl_rollout(tmp_path, relay_url=relay.url, **given)
        await rollout.update_weights(iter(weights.items()), global_steps=0)
        assert rollout._weights.publisher is not None
        assert sorted(spec.dtype for spec in rollout._weights.publisher.layout.tensors) == sorted(expected)
        rollout._weights.publisher.close()
    relay.stop()


@pytest.mark.parametrize("key", ["checkpoint", "quantized_like"])
def test_a_checkpoint_folder_that_is_not_there_is_refused(key: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {key: str(tmp_path / "none")}
    with pytest.raises(
        ValueError, match=f"checkpoint {tmp_path}/none: this machine has no such folder; give"
    ):
        verl_rollout(None, relay_url="embedded://127.0.0.1:1", **given)


def test_ranks_without_the_checkpoint_publish_in_the_dtypes_that_rank_0_has_read(tmp_path: Path) -> None:
    """Rank 1 publishes the tensor that is float32 in the checkpoint."""
    weights = {"a": torch.ones(4, 4).bfloat16(), "decay": torch.ones(4)}
    save_file(weights, tmp_path / "model.safetensors")
    relay = RelayProcess("embedded")
    program = [sys.executable, str(Path(__file__).with_name("verl_rank.py"))]
    ranks = [
        subprocess.Popen([*program, *arguments], stdout=subprocess.PIPE, text=True)
        for arguments in (
            ("0", str(tmp_path / "world"), relay.url, str(tmp_path)),
            ("1", str(tmp_path / "world"), relay.url),
        )
    ]
    assert [rank.communicate()[0] for rank in ranks] == ["BF16 F32\n"] * 2
    relay.stop()
