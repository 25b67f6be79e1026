"""verl's own trainer with FSDP2 on the processor: its turns and weights go through ROSE to a real engine."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.whole.trained_engine import TrainedEngine
from tests.trainers.whole.verl_program import BATCH, NUM_STEPS, RUN, SAMPLES

pytest.importorskip("verl.trainer.ppo.v1", reason="verl is not installed (CONTRIBUTING.md)")

pytestmark = [pytest.mark.vllm, pytest.mark.clients, pytest.mark.slow]

MODES = ("sync", "colocate_async")


def write_prompts(path: Path) -> None:
    from datasets import Dataset

    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"w{number} w{number + 1}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(5, 5 + BATCH * NUM_STEPS)
    ]
    Dataset.from_list(rows).to_parquet(path)


def write_tokenizer(model: Path, folder: Path) -> None:
    """The model's, with two tokens that verl looks for in a Qwen's, and that no turn here has."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["\n", "<|im_end|>"])
    tokenizer.save_pretrained(folder)


class Trained(TrainedEngine):
    """What is left when verl has trained: the relay, the engine, and what the router has counted."""

    def __init__(self, mode: str, folder: Path) -> None:
        super().__init__(folder, RUN)
        self.mode = mode
        write_prompts(folder / "train.parquet")
        write_tokenizer(self.model, folder / "tokenizer")
        self.turns: Any = None

    def run(self) -> None:
        self.start()
        env = {
            "VERL_USE_EXTERNAL_MODULES": "verl_cpu,rose.trainers.verl",
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",  # the engines of that name run on any device of torch
        }
        router = asyncio.run(self.train("verl_program.py", env, self.mode))
        self.turns = router.plane.records.counters.as_json()

    def rollouts(self, step: int) -> list[Any]:
        lines = (self.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def logged(self, metric: str) -> list[float]:
        """What verl says of each step; its numbers may be numpy's."""
        number = rf"{metric}:(?:np\.\w+\()?([-+.e\d]+)"
        return [float(each) for each in re.findall(number, self.log)]


@pytest.fixture(scope="module", params=MODES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    made = Trained(request.param, tmp_path_factory.mktemp(request.param))
    try:
        made.run()
        yield made
    finally:
        made.close()


def test_each_turn_of_every_step_is_answered_by_the_router(trained: Trained) -> None:
    assert trained.turns["turns"]["finished"] >= BATCH * SAMPLES * NUM_STEPS
    for step in range(1, NUM_STEPS + 1):
        assert len(trained.rollouts(step)) == BATCH * SAMPLES


def test_turns_are_answered_by_the_weights_of_the_step_before(trained: Trained) -> None:
    """So the versions of the turns say, and the engine's logprobs, which verl compares with its own.

    The asynchronous trainer asks for turns while it trains, so they may be older.
    """
    lags = trained.logged("trajectory_staleness_worst/max")
    differences = trained.logged("rollout_probs_diff_mean")
    assert len(lags) == len(differences) == NUM_STEPS
    if trained.mode == "sync":
        assert lags == [0.0] * NUM_STEPS
        assert max(differences) < 0.005
    else:
        assert all(0 <= lag <= NUM_STEPS for lag in lags)


def test_the_engine_runs_what_verl_has_trained(trained: Trained) -> None:
    """The last version has the bits of the checkpoint that verl has saved, and the engine's own hash."""
    saved = trained.folder / "checkpoints" / f"global_step_{NUM_STEPS}" / "actor" / "huggingface"
    trained.assert_runs(saved, NUM_STEPS)
