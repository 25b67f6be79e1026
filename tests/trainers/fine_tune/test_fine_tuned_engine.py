"""`rose serve --fine-tune` on a real engine: it learns texts or preferences, and the trainer may die."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rose.admission.board_snapshot import snapshot
from rose.memory.pool.pool import PoolClient
from tests.trainers.fine_tune.fine_tuned_engine import Served, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WORDS = [f"w{number}" for number in range(100)]
OFTEN = ("--fine-tune-publish-s", "3")
TEXTS = [" ".join(WORDS[start : start + 24]) for start in range(0, 72, 6)]
"""Each word is followed by the next one."""
PAIRS = [
    {
        "prompt": WORDS[n],
        "chosen": f"{WORDS[n + 1]} {WORDS[n + 2]}",
        "rejected": f"{WORDS[n + 20]} {WORDS[n]}",
    }
    for n in range(0, 60, 5)
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with TemporaryDirectory(prefix="rose-test-") as folder:  # short, as a socket's path may have 107 bytes
        made = Served(Path(folder), [{"text": text} for text in TEXTS], *OFTEN)
        yield made
        made.close()


def test_the_served_loss_falls_without_a_restart_and_serving_outlives_the_trainer(served: Served) -> None:
    before = served.loss(TEXTS)
    engine_id = served.status()["engine_id"]
    until(lambda: served.loss(TEXTS) < before - 1.0, "the served loss falls", served)
    status = served.status()
    assert status["engine_id"] == engine_id
    assert int(status["weight_version"].rpartition("/")[2]) >= 1
    steps = [json.loads(line) for line in served.lines.read_text().splitlines()]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1.0
    assert steps[-1]["grants"] > len(steps)  # a step is several pieces

    [trainer] = served.trainers()
    with PoolClient.observe(served.pool, runtime_dir=served.runtime_dir) as observer:
        board = observer.board_words
        until(lambda: snapshot(board).rollout.num_steps > 0, "the trainer computes", served)
        trainer.kill()
        until(lambda: not snapshot(board).rollout.alive, "the trainer is gone", served)
        versions = {served.status()["weight_version"] for _ in range(3)}
        after = [served.loss(TEXTS) for _ in range(3)]
    assert max(after) < before - 1.0 and len(versions) == 1
    until(lambda: "died name=trainer" in served.log.read_text(), "a line about the trainer", served)
    assert served.process.is_alive()


def test_two_processes_train_as_one_guest_and_end_together() -> None:
    with TemporaryDirectory(prefix="rose-test-") as folder:
        served = Served(
            Path(folder), [{"text": text} for text in TEXTS], *OFTEN, "--fine-tune-processes", "2"
        )
        try:
            before = served.loss(TEXTS)
            until(lambda: served.loss(TEXTS) < before - 0.3, "the served loss falls", served)
            _, follower = served.trainers()
            with PoolClient.observe(served.pool, runtime_dir=served.runtime_dir) as observer:
                board = observer.board_words
                until(lambda: snapshot(board).rollout.num_steps > 0, "the trainer computes", served)
                assert len(snapshot(board).guests) == 1
                follower.kill()
                until(lambda: not served.trainers(), "the end of the other process", served)
                assert not snapshot(board).rollout.alive
            until(lambda: "died name=trainer-1" in served.log.read_text(), "a line about it", served)
            assert served.loss(TEXTS) < before - 0.3 and served.process.is_alive()
        finally:
            served.close()


def test_what_is_served_learns_to_prefer_the_chosen_answers() -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    with TemporaryDirectory(prefix="rose-test-") as folder:
        served = Served(Path(folder), PAIRS, *OFTEN)
        try:

            def preference() -> float:
                """How much likelier the chosen answers are than the rejected ones, in nats a token."""
                chosen, rejected = (
                    [f"{p['prompt']} {p[kind]}" for p in PAIRS] for kind in ("chosen", "rejected")
                )
                return served.loss(rejected) - served.loss(chosen)

            before = preference()
            until(lambda: preference() > before + 1.0, "the chosen answers become likelier", served)
            steps = [json.loads(line) for line in served.lines.read_text().splitlines()]
            assert steps[-1]["loss"] < steps[0]["loss"] and steps[-1]["grants"] > len(steps)
        finally:
            served.close()
