"""`rose serve --fine-tune --fine-tune-reward` on a real engine: what it answers gets more reward."""

import json
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rose.admission.board_snapshot import snapshot
from rose.memory.pool.pool import PoolClient
from tests.trainers.fine_tune.fine_tuned_engine import Served, until
from tests.trainers.fine_tune.toy_reward import wanted_words

pytest.importorskip("trl", reason="trl is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REWARD = "tests.trainers.fine_tune.toy_reward:wanted_words"
WANTED = "100"
"""The number of words that are rewarded. There are about 300, so a model that has learned nothing gets a
third."""
ROWS = [{"prompt": f"w{n} w{n + 1}", "wanted": WANTED} for n in range(0, 8)]
ANSWER_TOKENS = 8
FLAGS = (
    *("--fine-tune-reward", REWARD, "--fine-tune-samples", "8", "--fine-tune-micro-batch", "2"),
    *("--fine-tune-answer-tokens", str(ANSWER_TOKENS), "--fine-tune-learning-rate", "0.006"),
)


def served_reward(served: Served) -> float:
    """The mean reward of 32 answers that a user of the engine gets."""
    prompts = [row["prompt"] for row in ROWS] * 4
    return fmean(wanted_words(served.answers(prompts, ANSWER_TOKENS), [WANTED] * len(prompts)))


CHATS = [{"messages": [{"role": "user", "content": row["prompt"]}], "wanted": WANTED} for row in ROWS]


@pytest.mark.parametrize(("processes", "rows"), [("1", ROWS), ("2", CHATS)], ids=["1", "2"])
def test_the_reward_of_served_answers_rises_without_a_restart(
    processes: str, rows: list[dict[str, Any]]
) -> None:
    with TemporaryDirectory(prefix="rose-test-") as folder:
        served = Served(Path(folder), rows, *FLAGS, "--fine-tune-processes", processes)
        try:
            before, engine_id = served_reward(served), served.status()["engine_id"]
            assert before < 0.5
            until(lambda: served_reward(served) > 0.75, "the served reward rises", served)
            status = served.status()
            assert status["engine_id"] == engine_id
            assert int(status["weight_version"].rpartition("/")[2]) >= 1
            steps = [json.loads(line) for line in served.lines.read_text().splitlines()]
            assert max(step["reward"] for step in steps) > steps[0]["reward"] + 0.2
            assert steps[-1]["grants"] > len(steps)  # a step is several pieces
            assert steps[-1]["version"] >= len(steps) - 1  # each step has made one
            with PoolClient.observe(served.pool, runtime_dir=served.runtime_dir) as observer:
                board = observer.board_words
                until(lambda: snapshot(board).rollout.num_steps > 0, "the trainer computes", served)
        finally:
            served.close()
