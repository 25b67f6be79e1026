"""A worker that is lent to a job gets the weights of that job's run, each from a mirror of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from loading_worker import LoadingWorker
from pydantic import JsonValue
from training_steps import Weights, step
from waiting_for import DEADLINE_S, wait_for

from rose.engine.http.loaned_run import LoanedRun
from rose.errors import RelayError
from rose.transfer.format.architecture import Architecture
from rose.transfer.format.layout import Layout, TensorSpec
from rose.transfer.format.manifest import LayoutBody, layout_key, unpack_body
from rose.transfer.publish.publisher import WeightPublisher


def drawn(seed: int, rows: int = 200) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}.weight": torch.randn(rows, 50, generator=generator) for i in range(3)}


@pytest.fixture
def worker() -> Iterator[LoadingWorker]:
    worker = LoadingWorker()
    worker.loan = LoanedRun()
    yield worker
    worker.stop()


class Subscribed:
    """The subscriber's process, which can be killed and started again."""

    def __init__(self, url: str, worker: LoadingWorker, staging: Path) -> None:
        program = [sys.executable, "-m", "rose.transfer.follow.subscriber", "--relay", url]
        self._command = [*program, "--worker", worker.url, "--name", "w", "--staging", str(staging)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, env={**os.environ, "ROSE_KEY": "secret"})

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait(DEADLINE_S)


@pytest.fixture
def subscribed(embedded_url: str, worker: LoadingWorker, tmp_path: Path) -> Iterator[Subscribed]:
    staging = tmp_path / "staging"
    subscribed = Subscribed(embedded_url, worker, staging)
    yield subscribed
    subscribed.end(signal.SIGTERM)
    assert list(staging.iterdir()) == []


@pytest.fixture
def runs(embedded_url: str) -> Iterator[list[tuple[WeightPublisher, Weights]]]:
    """Two runs, `a` and `b`, with a version each."""
    found = []
    for seed, name in enumerate("ab"):
        weights = drawn(seed)
        found.append((WeightPublisher(weights, embedded_url, name, key="secret"), weights))
        found[-1][0].publish()
    yield found
    for publisher, _ in found:
        publisher.close()


def test_a_lent_worker_gets_its_jobs_weights_and_follows_that_run_alone(
    worker: LoadingWorker, subscribed: Subscribed, runs: list[tuple[WeightPublisher, Weights]]
) -> None:
    (a, weights_of_a), (b, weights_of_b) = runs
    worker.lend("a")
    wait_for(lambda: worker.version == "a/0")
    worker.lend("b")
    wait_for(lambda: worker.version == "b/0")
    step(weights_of_a)
    a.publish()
    step(weights_of_b)
    b.wait_acked(b.publish().version, ["w"], DEADLINE_S)
    wait_for(lambda: a.acked() == {})  # no trainer waits for a worker that another job has
    worker.lend("a")
    a.wait_acked(a.publish().version, ["w"], DEADLINE_S)
    assert worker.loaded[:3] == ["a/0", "b/0", "b/1"]
    assert [each.rpartition("/")[0] for each in worker.loaded[3:]] == ["a"] * len(worker.loaded[3:])
    whole = [update.version for update in worker.updates if update.whole_because is not None]
    assert whole[:2] == ["a/0", "b/0"] and whole[2] in ("a/1", "a/2"), "b/1 came as changes"


def test_a_subscriber_that_is_killed_during_a_switch_is_missed_and_the_next_one_ends_the_switch(
    worker: LoadingWorker, subscribed: Subscribed, runs: list[tuple[WeightPublisher, Weights]]
) -> None:
    assert worker.loan is not None
    worker.lend("a")
    wait_for(lambda: worker.version == "a/0")
    worker.may_load.clear()
    worker.lend("b")
    subscribed.end(signal.SIGKILL)
    worker.may_load.set()
    wait_for(lambda: worker.loan is not None and not worker.loan.is_followed)
    subscribed.start()
    wait_for(lambda: worker.version == "b/0" and worker.loan is not None and worker.loan.is_followed)


def test_what_a_worker_can_not_follow_is_told_with_the_reason(
    embedded_url: str,
    worker: LoadingWorker,
    subscribed: Subscribed,
    runs: list[tuple[WeightPublisher, Weights]],
) -> None:
    worker.lend("a")
    wait_for(lambda: worker.version == "a/0")
    other = WeightPublisher(drawn(0, rows=100), embedded_url, "other", key="secret")
    other.publish()

    def is_told(run: str) -> bool:
        return worker.loan is not None and run in worker.loan.problems

    reasons = {
        "other": "run other is of another architecture than this engine's model: layer0.weight has shape",
        "none": "the run has published nothing in this relay",
        "a/b": "run id 'a/b' must be",
    }
    for run, reason in reasons.items():
        worker.lend(run)
        wait_for(partial(is_told, run))
        assert worker.loan is not None and reason in worker.loan.problems[run]
    worker.lend("a")
    wait_for(lambda: worker.loan is not None and worker.loan.run == "a")
    assert set(worker.loaded) == {"a/0"}
    other.close()


def body(num_tensors: int = 2, rows: int = 4, **config: JsonValue) -> LayoutBody:
    specs = [TensorSpec(name=f"t{i}", dtype="BF16", shape=(rows, 2)) for i in range(num_tensors)]
    return LayoutBody.of(Layout(specs), config=config)


def test_weights_with_other_tensors_or_another_config_are_of_another_architecture() -> None:
    shapes = {"t0": (4, 2), "t1": (4, 2), "lm_head.weight": (4, 2)}
    own = Architecture(shapes=shapes, config={"num_attention_heads": 4, "model_type": "qwen3"})
    own.require("r", body(num_attention_heads=4, rms_norm_eps=1e-6))
    wrongs = {
        "t1 is missing": body(1),
        "t2 is not known": body(3),
        "t0 has shape": body(rows=3),
        "its num_attention_heads is 8, the model's is 4": body(num_attention_heads=8),
    }
    for reason, wrong in wrongs.items():
        with pytest.raises(RelayError, match=reason):
            own.require("r", wrong)


def test_a_trainers_module_says_what_its_architecture_is(embedded_url: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=16
    )
    publisher = WeightPublisher(transformers.Qwen3ForCausalLM(config), embedded_url, "r", key="secret")
    publisher.publish()
    data = publisher.relay.get(layout_key("r"))
    assert data is not None
    found = unpack_body(data, LayoutBody, "LAYOUT").config
    publisher.close()
    assert found is not None and (found["model_type"], found["num_attention_heads"]) == ("qwen3", 2)
