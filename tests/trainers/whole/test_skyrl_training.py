"""SkyRL's own trainer with FSDP2 on the processor: its turns and weights go through ROSE to a real engine."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.scheduler.rollout.http.command import RunningRouter
from tests.trainers.whole.skyrl_program import BATCH, NUM_STEPS, RUN, SAMPLES
from tests.trainers.whole.trained_engine import TrainedEngine

pytest.importorskip("skyrl.train.config", reason="SkyRL is not installed (CONTRIBUTING.md)")
pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed (CONTRIBUTING.md)")

pytestmark = [pytest.mark.vllm, pytest.mark.clients, pytest.mark.slow]


def write_prompts(path: Path) -> None:
    from datasets import Dataset

    numbers = range(5, 5 + BATCH * NUM_STEPS)
    rows = [{"prompt": [{"role": "user", "content": f"w{number} w{number + 1}"}]} for number in numbers]
    Dataset.from_list(rows).to_parquet(path)


class Trained(TrainedEngine):
    """What is left when SkyRL has trained: the relay, the engine, and which weights made each turn."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, RUN)
        write_prompts(folder / "train.parquet")
        self.versions: list[set[str]] = []

    def run(self) -> None:
        self.start()
        asyncio.run(self.train("skyrl_program.py", {}, watch=self._watch))

    def _watch(self, router: RunningRouter) -> None:
        """Notes the weights of each turn that the router has answered."""
        records: Any = router.plane.records
        finish = records.finished

        def finished(single: Any, *rest: Any) -> None:
            self.versions.append({str(span.weight_version) for span in single.generation.spans})
            finish(single, *rest)

        records.finished = finished

    def logged(self, metric: str) -> list[float]:
        """What SkyRL says of each step."""
        return [float(each) for each in re.findall(rf"'{metric}': '([-.\d]+)'", self.log)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    made = Trained(tmp_path_factory.mktemp("skyrl"))
    try:
        made.run()
        yield made
    finally:
        made.close()


def test_each_turn_of_a_step_is_answered_by_the_weights_of_the_step_before(trained: Trained) -> None:
    """So the router says, and the engine's logprobs, which SkyRL compares with its own."""
    num_turns = BATCH * SAMPLES
    expected = [{f"{RUN}/{step}"} for step in range(NUM_STEPS) for _ in range(num_turns)]
    assert trained.versions == expected
    differences = trained.logged("policy/rollout_train_logprobs_abs_diff_mean")
    assert len(differences) == NUM_STEPS
    assert max(differences) < 0.05


def test_the_engine_runs_what_skyrl_has_trained(trained: Trained) -> None:
    """The last version has the bits of the checkpoint that SkyRL has saved, and the engine's own hash."""
    trained.assert_runs(trained.folder / "exports" / f"global_step_{NUM_STEPS}" / "policy", NUM_STEPS)
