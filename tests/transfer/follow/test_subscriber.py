"""The subscriber process makes a real HTTP worker load every version."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from loading_worker import LoadingWorker
from training_steps import Weights, step
from waiting_for import DEADLINE_S, wait_for

from rose.messages import NOTHING_PUBLISHED
from rose.signature import Signer, make_signing_key
from rose.transfer.follow import delivery, subscriber
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.following import Subscriber
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.follow.shared_mirror import SharedMirror
from rose.transfer.format.leases import ACK_EVERY_S, ACK_LEASE_S
from rose.transfer.format.manifest import BucketEntry, worker_name
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay.opening import open_relay
from rose.types import BytesLike

Subscribe = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def worker() -> Iterator[LoadingWorker]:
    worker = LoadingWorker()
    yield worker
    worker.stop()


@pytest.fixture
def subscribe(worker: LoadingWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subscribe]:
    """Starts subscriber processes. Each must end cleanly on SIGTERM and leave no staged file."""
    monkeypatch.setenv("ROSE_KEY", "secret")
    started: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(url: str, *options: str) -> subprocess.Popen[bytes]:
        staging = tmp_path / f"staging{len(started)}"
        command = [
            sys.executable,
            "-m",
            "rose.transfer.follow.subscriber",
            "--relay",
            url,
            "--worker",
            worker.url,
        ]
        started.append((subprocess.Popen([*command, "--staging", str(staging), *options]), staging))
        return started[-1][0]

    yield start
    for process, staging in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        if process.wait(timeout=DEADLINE_S) == 0:
            assert list(staging.iterdir()) == []
        else:
            assert process.returncode == -signal.SIGKILL


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(0)
    return {f"layer{i}.weight": torch.randn(200, 50) for i in range(3)}


def test_a_worker_follows_the_trainer_and_acknowledges_each_version(
    relay_url: str, worker: LoadingWorker, subscribe: Subscribe, weights: Weights
) -> None:
    publisher = WeightPublisher(weights, relay_url, "run")
    subscribe(relay_url, "--run", "run")
    names = [worker_name(worker.url)]
    for _ in range(4):
        report = publisher.publish()
        publisher.wait_acked(report.version, names, DEADLINE_S)
        step(weights)
    assert worker.loaded == ["run/0", "run/1", "run/2", "run/3"]
    assert [len(update.changes) for update in worker.updates] == [0, 1, 1, 1]
    assert worker.updates[0].whole_because == "this is the first delivery to this engine"
    assert worker.files[-1] == ["changes-run-3", "weights.safetensors"]
    publisher.close()


@pytest.mark.slow
def test_a_refusing_worker_keeps_its_version_and_then_gets_only_the_newest(
    embedded_url: str, worker: LoadingWorker, subscribe: Subscribe, weights: Weights
) -> None:
    publisher = WeightPublisher(weights, embedded_url)
    subscribe(embedded_url, "--run", "auto", "--name", "w")
    publisher.wait_acked(publisher.publish().version, ["w"], DEADLINE_S)
    worker.is_refusing = True
    step(weights)
    publisher.publish()
    wait_for(lambda: worker.refused >= 2)
    step(weights)
    newest = publisher.publish().version
    assert publisher.acked() == {"w": 0}
    worker.is_refusing = False
    publisher.wait_acked(newest, ["w"], DEADLINE_S)
    assert worker.loaded[-1] == str(newest) and len(worker.loaded) <= 3
    publisher.close()


@pytest.mark.slow
def test_a_restarted_trainer_and_a_restarted_subscriber_are_followed(
    embedded_url: str, worker: LoadingWorker, subscribe: Subscribe, weights: Weights
) -> None:
    first = WeightPublisher(weights, embedded_url)
    subscriber = subscribe(embedded_url, "--name", "w")
    first.wait_acked(first.publish().version, ["w"], DEADLINE_S)
    first.close()
    second = WeightPublisher(weights, embedded_url)
    second.wait_acked(second.publish().version, ["w"], DEADLINE_S)
    subscriber.kill()
    subscriber.wait()
    step(weights)
    newest = second.publish().version
    subscribe(embedded_url, "--name", "w")
    second.wait_acked(newest, ["w"], DEADLINE_S)
    assert worker.loaded == [f"{first.run_id}/0", f"{second.run_id}/0", f"{second.run_id}/1"]
    second.close()


@pytest.mark.slow
def test_a_worker_that_lost_its_weights_gets_them_again(
    embedded_url: str, worker: LoadingWorker, subscribe: Subscribe, weights: Weights
) -> None:
    publisher = WeightPublisher(weights, embedded_url, "run")
    subscribe(embedded_url, "--name", "w")
    publisher.wait_acked(publisher.publish().version, ["w"], DEADLINE_S)
    worker.version = None
    wait_for(lambda: worker.version == "run/0")
    assert worker.loaded == ["run/0", "run/0"]
    publisher.close()


@pytest.mark.slow
def test_a_worker_gets_a_signed_run_and_one_with_another_public_key_gets_nothing(
    embedded_url: str,
    worker: LoadingWorker,
    subscribe: Subscribe,
    weights: Weights,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    signing_key = make_signing_key()
    publisher = WeightPublisher(weights, embedded_url, "run", signing_key=signing_key)
    monkeypatch.setenv("ROSE_PUBLIC_KEY", Signer(signing_key).public_key)
    subscribe(embedded_url, "--name", "w", "--run", "run")
    for _ in range(2):
        publisher.wait_acked(publisher.publish().version, ["w"], DEADLINE_S)
        step(weights)
    monkeypatch.setenv("ROSE_PUBLIC_KEY", Signer(make_signing_key()).public_key)
    subscribe(embedded_url, "--name", "other", "--run", "run")
    log: list[str] = []

    def is_refused() -> bool:
        log.append(capfd.readouterr().err)
        return "LAYOUT has a signature that does not belong to ROSE_PUBLIC_KEY" in "".join(log)

    wait_for(is_refused)
    assert publisher.acked() == {"w": 1}
    publisher.close()


def test_a_subscriber_stops_although_its_worker_hangs(
    embedded_url: str, worker: LoadingWorker, subscribe: Subscribe, weights: Weights
) -> None:
    worker.is_hanging = True
    publisher = WeightPublisher(weights, embedded_url)
    publisher.publish()
    subscriber = subscribe(embedded_url, "--name", "w")
    wait_for(lambda: worker.hung)
    subscriber.send_signal(signal.SIGTERM)
    assert subscriber.wait(timeout=DEADLINE_S) == 0
    assert publisher.acked() == {}
    publisher.close()


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--relay", "embedded://127.0.0.1:1", "127.0.0.1:1"),
        ("--relay", "nonsense", "relay URL 'nonsense'"),
        ("--run", "a/b", "run id 'a/b' must be"),
        ("--worker", "127.0.0.1:1", "expected http://HOST:PORT"),
        ("--staging", "/dev/null/folder", "--staging /dev/null/folder: Not a directory"),
        ("--base", "/nowhere", "/nowhere does not exist"),
        ("--name", "a/b", "worker name 'a/b' must be"),
    ],
)
def test_a_bad_option_is_one_clear_line_and_status_2(
    embedded_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    value: str,
    message: str,
) -> None:
    options = {
        "--relay": embedded_url,
        "--worker": "http://127.0.0.1:1",
        "--staging": str(tmp_path),
        flag: value,
    }
    monkeypatch.setattr(sys, "argv", ["subscriber", *(word for pair in options.items() for word in pair)])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(SystemExit) as ended:
            subscriber.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_worker_that_loads_for_as_long_as_it_may_is_not_taken_for_gone() -> None:
    assert delivery.WORKER_TIMEOUT_S + ACK_EVERY_S < ACK_LEASE_S


@pytest.fixture
def subscribed(embedded_url: str, worker: LoadingWorker, tmp_path: Path) -> Iterator[Subscriber]:
    """A subscriber in this process, which looks when it is told to."""
    relay = open_relay(embedded_url)
    client = delivery.WorkerClient(worker.url, "secret")
    store = SharedMirror(tmp_path)
    follower = Follower(relay, "run", WeightMirror(store=store))
    yield Subscriber(relay, follower, store, [("w", client)])
    worker.may_load.set()
    for each in (store, client, relay):
        each.close()


def test_what_an_earlier_try_found_is_told_neither_when_a_run_is_wanted_again_nor_during_a_fetch(
    embedded_url: str, subscribed: Subscriber, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribed.step(0.0)
    assert subscribed.problem("w") == NOTHING_PUBLISHED
    publisher = WeightPublisher(weights, embedded_url, "run")
    publisher.publish()
    told, fetch = [], subscribed._follower._frames

    def watched(entries: Sequence[BucketEntry]) -> Iterator[BytesLike]:
        told.append(subscribed.problem("w"))
        return fetch(entries)

    monkeypatch.setattr(subscribed._follower, "_frames", watched)
    with monkeypatch.context() as broken:
        broken.setattr(subscribed._follower, "_frames", lambda entries: iter([b""]))
        subscribed.step(0.0)
    assert subscribed.error is not None
    subscribed.want("w", is_wanted=False)
    subscribed.want("w", is_wanted=True)
    assert subscribed.problem("w") is None
    subscribed.wait(0.0)
    subscribed.step(0.0)
    assert told and set(told) == {None}
    publisher.close()


def test_a_worker_slower_than_its_trainer_moves_on_by_changes_alone(
    embedded_url: str, worker: LoadingWorker, subscribed: Subscriber, weights: Weights
) -> None:
    """The mirror stays at the version that the worker is taking, and never goes on further than changes are
    kept.
    """
    publisher = WeightPublisher(weights, embedded_url, "run")
    generator = torch.Generator().manual_seed(1)
    clock = count()

    def publish() -> str:
        for tensor in weights.values():
            places = torch.randperm(tensor.numel(), generator=generator)[: tensor.numel() // 100]
            tensor.view(-1)[places] += 1.0
        return str(publisher.publish().version)

    def look() -> None:
        subscribed.step(0.001 * next(clock))

    def has_loaded(num_versions: int) -> bool:
        look()
        return len(worker.loaded) >= num_versions

    publish()
    wait_for(lambda: has_loaded(1))
    for num_loaded in range(1, 5):
        worker.may_load.clear()
        for _ in range(6):
            publish()
            look()
        worker.may_load.set()
        wait_for(partial(has_loaded, num_loaded + 1))
    newest = publish()
    wait_for(lambda: has_loaded(1) and worker.version == newest)
    assert worker.refused == 0
    assert [update.whole_because for update in worker.updates[1:]] == [None] * (len(worker.updates) - 1)
    assert max(len(update.changes) for update in worker.updates) > 1
    publisher.close()


@pytest.mark.slow
def test_a_subscriber_renews_its_acknowledgement_while_its_worker_stays(
    embedded_url: str, worker: LoadingWorker, subscribed: Subscriber, weights: Weights
) -> None:
    publisher = WeightPublisher(weights, embedded_url, "run")
    publisher.publish()
    subscribed.step(0.0)
    subscribed.wait(0.0)
    beats: list[int] = []
    for now_s in (0.0, 1.0, ACK_EVERY_S, ACK_EVERY_S + 1):
        subscribed.step(now_s)
        subscribed.wait(now_s)
        beats.append(publisher.acks()["w"].beat)
    assert beats == [1, 1, 2, 2]
    publisher.close()
