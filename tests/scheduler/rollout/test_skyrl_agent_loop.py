"""SkyRL's unmodified agent loop: SkyRLGymGenerator plays an environment of several turns through a router."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.stock_worker import SERVED_MODEL, StockWorker

remote: Any = pytest.importorskip(
    "skyrl.backends.skyrl_train.inference_servers.remote_inference_client",
    reason="SkyRL is not installed (CONTRIBUTING.md)",
)
skyrl_gym: Any = pytest.importorskip("skyrl_gym", reason="SkyRL's environments are not installed")
environments: Any = pytest.importorskip("skyrl_gym.envs.base_text_env")

pytestmark = [pytest.mark.vllm, pytest.mark.clients]

NUM_TURNS = 3
TURN_TOKENS = 5


class Echo(environments.BaseTextEnv):  # type: ignore[misc]
    """Says something after each answer, and counts it."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        is_over = self.turns == NUM_TURNS
        said = [] if is_over else [{"role": "user", "content": f"w{20 + self.turns} w9"}]
        return {"observations": said, "reward": float(self.turns), "done": is_over, "metadata": {}}


@dataclass
class GymSettings:
    max_env_workers: int = 0


async def test_trajectories_of_several_turns_keep_their_tokens_and_their_sessions(
    engine: StockWorker,
) -> None:
    from skyrl.train.config import GeneratorConfig, SamplingParams
    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
    from transformers import AutoTokenizer

    skyrl_gym.register(id="echo", entry_point=Echo)
    sampling = {"max_tokens": TURN_TOKENS, "temperature": 0.0, "logprobs": 1, "ignore_eos": True}
    generator_config = GeneratorConfig(
        max_turns=NUM_TURNS,
        max_input_length=400,
        sampling_params=SamplingParams(max_generate_length=TURN_TOKENS, logprobs=1),
    )
    async with running_router(engine.url) as router:
        client = remote.RemoteInferenceClient(
            proxy_url=router.url, server_urls=[engine.url], data_parallel_size=1, model_name=SERVED_MODEL
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(engine.model)
        generator = SkyRLGymGenerator(generator_config, GymSettings(), client, tokenizer)
        names = [TrajectoryID(instance_id=name, repetition_id=0) for name in ("a", "b")]
        output = await generator.generate(
            {
                "prompts": [[{"role": "user", "content": f"w{9 + at} w10"}] for at in (0, 1)],
                "env_classes": ["echo", "echo"],
                "env_extras": [{}, {}],
                "trajectory_ids": names,
                "sampling_params": sampling,
            },
            disable_tqdm=True,
        )
        await client.teardown()
        jobs: Any = router.plane.status()["jobs"]
    masks = output["loss_masks"]
    assert [sum(mask) for mask in masks] == [NUM_TURNS * TURN_TOKENS] * 2
    assert [len(ids) for ids in output["response_ids"]] == [len(mask) for mask in masks]
    assert [len(each) for each in output["rollout_logprobs"]] == [len(mask) for mask in masks]
    assert output["stop_reasons"] == ["length", "length"]
    [job] = jobs.values()
    assert (job["turns"], job["next_turns"]["extended"]) == (2 * NUM_TURNS, 2 * (NUM_TURNS - 1))
    assert not len(router.plane.trajectories.sessions), "the loop says when a trajectory has ended"
