"""A worker that is lent to a job gets the weights of that job's run, each from a mirror of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import pytest
import torch
from loading_worker import LoadingWorker
from pydantic import JsonValue
from safetensors.torch import save_file
from training_steps import Weights, step
from waiting_for import DEADLINE_S, wait_for

from rose.engine.http.loaned_run import LoanedRun
from rose.errors import RelayError
from rose.transfer.follow import delivery, loans
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.following import Subscriber
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.follow.shared_mirror import SharedMirror
from rose.transfer.format.architecture import Architecture
from rose.transfer.format.layout import Layout, TensorSpec
from rose.transfer.format.manifest import LayoutBody, bucket_key, layout_key, unpack_body
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay.opening import open_relay


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_worker_without_a_loan_is_told_that_its_run_has_published_nothing_until_it_has(
    embedded_url: str, worker: LoadingWorker, subscribed: Subscribed
) -> None:
    assert worker.loan is not None and not worker.loan.has_subscriber
    wait_for(lambda: worker.loan is not None and worker.loan.has_subscriber)
    wait_for(lambda: worker.loan is not None and not worker.loan.may_have_published)
    worker.may_load.clear()
    with closing(WeightPublisher(drawn(0), embedded_url, "a", key="secret")) as publisher:
        publisher.publish()
        wait_for(lambda: worker.loan is not None and worker.loan.may_have_published)
        assert worker.version is None
        worker.may_load.set()
        wait_for(lambda: worker.version == "a/0")


@pytest.mark.slow
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


@pytest.mark.slow
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


TIED = "tie_word_embeddings"


@contextmanager
def loans_of(
    url: str, worker: LoadingWorker, folder: Path, architecture: Callable[[], Architecture | None], *more: str
) -> Iterator[None]:
    """The loans of a worker without a run of its own, and of those at the URLs of `more`, in this process."""
    link = partial(open_relay, url)
    with ExitStack() as opened:
        clients = {
            f"w{number}": opened.enter_context(closing(delivery.WorkerClient(each, "secret")))
            for number, each in enumerate((worker.url, *more))
        }
        store = opened.enter_context(closing(SharedMirror(folder)))
        relay = opened.enter_context(closing(link()))
        home = Subscriber(
            relay, Follower(relay, "home", WeightMirror(store=store)), store, list(clients.items())
        )

        def open_run(run: str, accept: Callable[[loans.LentRun, LayoutBody], None]) -> loans.LentRun:
            return loans.LentRun(run, folder / run, link, clients, None, None, accept)

        opened.enter_context(closing(loans.FollowedLoans(home, clients, open_run, architecture)))
        yield


def problem_of(worker: LoadingWorker, run: str) -> str | None:
    return worker.loan.problems.get(run) if worker.loan is not None else None


@pytest.mark.slow
def test_a_mirror_that_a_worker_holds_stays_where_there_is_no_memory_for_another(
    embedded_url: str,
    worker: LoadingWorker,
    runs: list[tuple[WeightPublisher, Weights]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with loans_of(embedded_url, worker, tmp_path, lambda: None):
        worker.lend("a")
        wait_for(lambda: worker.version == "a/0")
        monkeypatch.setattr(loans, "available_bytes", lambda: 0)
        worker.lend("b")
        wait_for(lambda: problem_of(worker, "b"))
        assert "beside those that engines hold, 0 are free" in str(problem_of(worker, "b"))
        assert (tmp_path / "a" / "weights.safetensors").exists()
        assert worker.waits_s[0] == 0, "the first answer is waited for"


@pytest.mark.slow
def test_two_runs_that_come_at_once_do_not_take_the_same_memory(
    embedded_url: str,
    worker: LoadingWorker,
    runs: list[tuple[WeightPublisher, Weights]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = runs[0][0].relay.get(layout_key("a"))
    assert data is not None
    size = unpack_body(data, LayoutBody, "LAYOUT").to_layout().num_bytes
    both_look = Barrier(2)

    def free() -> int:
        made = sum(path.stat().st_size for path in tmp_path.glob("*/weights*"))
        with suppress(BrokenBarrierError):
            both_look.wait(1.0)
        return round(1.5 * size) - made

    monkeypatch.setattr(loans, "available_bytes", free)
    other = LoadingWorker()
    other.loan = LoanedRun()
    try:
        with loans_of(embedded_url, worker, tmp_path, lambda: None, other.url):
            worker.lend("a")
            other.lend("b")
            wait_for(lambda: problem_of(worker, "a") or problem_of(other, "b"))
            assert len(list(tmp_path.glob("[ab]/weights*"))) == 1
    finally:
        other.stop()


@pytest.mark.slow
def test_a_worker_that_started_again_holds_no_mirror(
    embedded_url: str,
    worker: LoadingWorker,
    runs: list[tuple[WeightPublisher, Weights]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = tmp_path / "a" / "weights.safetensors"
    with loans_of(embedded_url, worker, tmp_path, lambda: None):
        worker.lend("a")
        wait_for(lambda: worker.version == "a/0")
        monkeypatch.setattr(loans, "available_bytes", lambda: 0 if held.exists() else 10**9)
        worker.restart()
        worker.lend("b")
        wait_for(lambda: worker.version == "b/0")
        assert not held.exists()


@pytest.mark.slow
def test_the_memory_of_a_fetch_that_broke_off_is_free_for_the_next_try(
    embedded_url: str,
    worker: LoadingWorker,
    runs: list[tuple[WeightPublisher, Weights]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relay = runs[0][0].relay
    (key,) = relay.keys(bucket_key("a", 0, None, 0))
    frame = relay.get(key)
    assert frame is not None
    relay.remove([key])
    file = tmp_path / "a" / "weights.partial"
    monkeypatch.setattr(loans, "available_bytes", lambda: 0 if file.exists() else 10**9)
    with loans_of(embedded_url, worker, tmp_path, lambda: None):
        worker.lend("a")
        wait_for(file.exists)
        relay.put(key, frame)
        wait_for(lambda: worker.version == "a/0")


@pytest.mark.slow
def test_a_run_that_fails_in_a_way_that_nobody_foresaw_is_told(
    embedded_url: str, worker: LoadingWorker, runs: list[tuple[WeightPublisher, Weights]], tmp_path: Path
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with loans_of(embedded_url, worker, tmp_path, fail):
        worker.lend("a")
        wait_for(lambda: problem_of(worker, "a"))
        assert "ZeroDivisionError" in str(problem_of(worker, "a"))


def test_a_lent_run_leaves_the_files_of_another_subscriber_alone(embedded_url: str, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with closing(SharedMirror(tmp_path)), pytest.raises(ValueError, match="another subscriber"):
        loans.LentRun(
            "a", tmp_path, partial(open_relay, embedded_url), {}, None, None, lambda run, body: None
        )
    assert (tmp_path / "kept").exists()


def body(num_tensors: int = 2, rows: int = 4, **config: JsonValue) -> LayoutBody:
    specs = [TensorSpec(name=f"t{i}", dtype="BF16", shape=(rows, 2)) for i in range(num_tensors)]
    return LayoutBody.of(Layout(specs), config=config)


def test_a_run_may_lack_integers_of_eight_bytes_that_a_model_has(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.zeros(4, 2, dtype=torch.bfloat16) for i in range(2)}
    save_file({**tensors, "position_ids": torch.arange(4)}, tmp_path / "model.safetensors")
    own = Architecture.known(None, tmp_path)
    assert own is not None
    own.require("r", body())


def test_weights_with_other_tensors_or_another_config_are_of_another_architecture() -> None:
    shapes = {"t0": (4, 2), "t1": (4, 2), "lm_head.weight": (4, 2)}
    own = Architecture(shapes=shapes, config={"num_attention_heads": 4, TIED: True})
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


def body_of(*names: str, **config: JsonValue) -> LayoutBody:
    return LayoutBody.of(
        Layout([TensorSpec(name=n, dtype="BF16", shape=(4, 2)) for n in names]), config=config
    )


def test_a_run_may_leave_out_a_head_only_if_the_model_ties_it() -> None:
    shapes = {"t0": (4, 2), "lm_head.weight": (4, 2)}
    untied, tied, unknown = (Architecture(shapes=shapes, config=c) for c in ({TIED: False}, {TIED: True}, {}))
    bare = Architecture(shapes={"t0": (4, 2)}, config={})
    tied.require("r", body_of("t0"))
    tied.require("r", body_of("t0", "lm_head.weight", **{TIED: True}))
    bare.require("r", body_of("t0", "lm_head.weight", **{TIED: True}))
    bare.require("r", body_of("t0"))
    wrongs = [
        (untied, body_of("t0"), "lm_head.weight is missing"),
        (unknown, body_of("t0"), "lm_head.weight is missing"),
        (untied, body_of("t0", "lm_head.weight", **{TIED: True}), "its tie_word_embeddings is True"),
        (tied, body_of("t0", "lm_head.weight", **{TIED: False}), "its tie_word_embeddings is False"),
        (bare, body_of("t0", "lm_head.weight", **{TIED: False}), "lm_head.weight is not known"),
    ]
    for own, wrong, reason in wrongs:
        with pytest.raises(RelayError, match=reason):
            own.require("r", wrong)


def test_a_run_may_leave_out_what_the_main_model_does_not_compute_with() -> None:
    main = ("model.layers.0.q", "model.layers.1.q")
    heads = ("model.mtp_layers.0.q", "mtp.fc.weight", "model.mtp_block.0.q", "model.layers.2.q")
    names = (*main, *heads, "model.layers.0.self_attn.rotary_emb.inv_freq", "drafter.q")
    shapes = dict.fromkeys(names, (4, 2))
    own = Architecture(shapes=shapes, config={"num_hidden_layers": 2, "num_nextn_predict_layers": 1})
    own.require("r", body_of(*main))
    own.require("r", body_of(*names))
    with pytest.raises(RelayError, match=r"model\.layers\.1\.q is missing"):
        own.require("r", body_of(main[0]))
    with pytest.raises(RelayError, match=r"model\.layers\.2\.q is missing"):
        Architecture(shapes=shapes, config={"num_hidden_layers": 3}).require("r", body_of(*main))


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
