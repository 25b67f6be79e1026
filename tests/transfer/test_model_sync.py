"""In a job's model sync every rollout rank gets all bits, and only one copy of them is sent."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
from relay_process import RelayProcess, stored, wait_folded
from slow_proxy import SlowProxy
from training_steps import Weights, step

from rose.errors import RelayError, WorkerError
from rose.transfer.format.codec import Codec
from rose.transfer.format.manifest import bucket_of, version_prefix
from rose.transfer.model_sync import ModelReceiver, ModelSender, peer_first, receiver_name
from rose.transfer.publish.publisher import SyncReport
from rose.transfer.relay.opening import open_relay
from rose.types import WeightVersion

RANKS = 4
RELAYS = 2
NAMES = [receiver_name(rank) for rank in range(RANKS)]
DEADLINE_S = 300.0

StartSenders = Callable[..., list[ModelSender]]
StartReceivers = Callable[[list[str]], list[ModelReceiver]]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RelayProcess]]:
    """Starts one relay on each of two rollout nodes."""
    started = [RelayProcess("embedded") for _ in range(RELAYS)]
    yield started
    for relay in started:
        relay.stop()


@pytest.fixture
def relays(nodes: list[RelayProcess]) -> list[RelayProcess]:
    """Returns the nodes' relays, all empty."""
    for relay in nodes:
        relay.emptied_url()
    return nodes


@pytest.fixture
def weights() -> Weights:
    """Returns the weights of data-parallel trainer ranks, each of which holds all of them."""
    torch.manual_seed(0)
    return {f"layer{i}.weight": torch.randn(60, 50).to(torch.bfloat16) for i in range(8)}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * RANKS) as executor:
        yield executor


@pytest.fixture
def start_senders(threads: ThreadPoolExecutor, weights: Weights) -> Iterator[StartSenders]:
    """Makes all trainer ranks, and closes them at the end."""
    made: list[ModelSender] = []

    def start(urls: list[str], codec: Codec | None = None) -> list[ModelSender]:
        def make(rank: int) -> ModelSender:
            return ModelSender(
                weights,
                urls,
                "run",
                rank=rank,
                num_ranks=RANKS,
                receivers=NAMES,
                bucket_bytes=3000,
                codec=codec,
            )

        made.extend(threads.map(make, range(RANKS)))
        return made

    yield start
    for sender in made:
        sender.close()


@pytest.fixture
def start_receivers() -> Iterator[StartReceivers]:
    """Makes all rollout ranks, and closes them at the end."""
    made: list[ModelReceiver] = []

    def start(urls: list[str]) -> list[ModelReceiver]:
        made.extend(ModelReceiver(urls, "run", rank=rank, num_ranks=RANKS) for rank in range(RANKS))
        return made

    yield start
    for receiver in made:
        receiver.close()


def urls_of(relays: list[RelayProcess]) -> list[str]:
    return [relay.url for relay in relays]


def send_all(
    threads: ThreadPoolExecutor, senders: list[ModelSender], timeout_s: float = DEADLINE_S
) -> list[Future[SyncReport]]:
    return [threads.submit(sender.send, timeout_s) for sender in senders]


def receive_all(
    threads: ThreadPoolExecutor, receivers: list[ModelReceiver], number: int
) -> list[WeightVersion]:
    return list(threads.map(lambda receiver: receiver.receive(number, DEADLINE_S), receivers))


def check_hold(receivers: list[ModelReceiver], weights: Weights) -> None:
    for receiver in receivers:
        receiver.mirror.check_integrity()
        loaded = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        receiver.load_into(loaded)
        assert all(loaded[name].equal(tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("codec", [Codec.DENSE, None])
@pytest.mark.slow
def test_every_rank_gets_all_bits_and_each_bucket_crosses_once(
    relays: list[RelayProcess],
    weights: Weights,
    threads: ThreadPoolExecutor,
    start_senders: StartSenders,
    start_receivers: StartReceivers,
    codec: Codec | None,
) -> None:
    senders, receivers = start_senders(urls_of(relays), codec=codec), start_receivers(urls_of(relays))
    for number in range(4):
        step(weights)
        sent = send_all(threads, senders)
        assert {version.number for version in receive_all(threads, receivers, number)} == {number}
        reports = [each.result() for each in sent]
        check_hold(receivers, weights)
        # The ranks together sent one copy and its manifests and headers, snapshots for late joiners included.
        num_changed = sum(report.num_changed for report in reports)
        assert num_changed <= reports[0].num_elements
        frame_bytes = frames_of(relays[0].url, number, number - 1 if number > 0 else None)
        sent_bytes = sum(report.wire_bytes + report.snapshot_bytes for report in reports)
        assert frame_bytes <= sent_bytes < frame_bytes + 20_000
        assert min(report.wire_bytes for report in reports) > frame_bytes / RANKS / 2, "the shares are even"


def frames_of(url: str, version: int, base: int | None) -> int:
    """Returns the bytes of a version's frames in a relay."""
    with closing(open_relay(url)) as relay:
        names = relay.keys(version_prefix("run", version, base))
        return sum(len(stored(relay, name)) for name in names if bucket_of(name) is not None)


@pytest.mark.slow
def test_a_late_joiner_starts_from_the_frames_of_a_dense_version(
    relays: list[RelayProcess],
    weights: Weights,
    threads: ThreadPoolExecutor,
    start_senders: StartSenders,
    start_receivers: StartReceivers,
) -> None:
    senders, receivers = start_senders(urls_of(relays), codec=Codec.DENSE), start_receivers(urls_of(relays))
    with closing(open_relay(",".join(urls_of(relays)))) as relay:
        for number in range(4):
            step(weights)
            sent = send_all(threads, senders)
            receive_all(threads, receivers, number)
            for each in sent:
                each.result()
            if number > 0:
                wait_folded(relay, "run", number)
    late = start_receivers(urls_of(relays))[-RANKS:]
    receive_all(threads, late, 3)
    check_hold(late, weights)
    with closing(open_relay(relays[1].url)) as relay:
        names = [name for name in relay.keys("rose/run/") if bucket_of(name) is not None]
    # Nobody needs the older versions any more, and the snapshots have no frames of their own.
    assert {name.split("/")[2] for name in names} == {"2-1", "3-2"}


def test_a_rank_that_died_is_named_and_the_others_have_the_version(
    relays: list[RelayProcess],
    weights: Weights,
    threads: ThreadPoolExecutor,
    start_senders: StartSenders,
    start_receivers: StartReceivers,
) -> None:
    senders, receivers = start_senders(urls_of(relays)), start_receivers(urls_of(relays))
    sent = send_all(threads, senders)
    receive_all(threads, receivers, 0)
    [each.result() for each in sent]
    step(weights)
    sent = send_all(threads, senders, timeout_s=0.0)
    with pytest.raises(WorkerError, match=r"run/1 .* rollout-0, rollout-1, rollout-2, rollout-3$"):
        sent[0].result()
    [each.result() for each in sent[1:]]
    receive_all(threads, receivers[:-1], 1)
    check_hold(receivers[:-1], weights)
    # The sender asks again, and every living receiver has acknowledged.
    step(weights)
    sent = send_all(threads, senders, timeout_s=0.0)
    receive_all(threads, receivers[:-1], 2)
    with pytest.raises(WorkerError, match="rollout-3"):
        sent[0].result()
    check_hold(receivers[:-1], weights)


def test_when_the_link_is_cut_every_rank_keeps_its_version(
    relays: list[RelayProcess],
    weights: Weights,
    threads: ThreadPoolExecutor,
    start_senders: StartSenders,
    start_receivers: StartReceivers,
) -> None:
    link = SlowProxy(relays[0].url)
    try:
        senders, receivers = start_senders([link.url]), start_receivers(urls_of(relays)[:1])
        sent = send_all(threads, senders)
        receive_all(threads, receivers, 0)
        [each.result() for each in sent]
        before = {name: tensor.clone() for name, tensor in weights.items()}
    finally:
        link.close()
    step(weights)
    for each in send_all(threads, senders):
        with pytest.raises(RelayError):
            each.result()
    for receiver in receivers:
        with pytest.raises(RelayError, match=r"no version 1 of run run within 0\.0 s, holds run/0"):
            receiver.receive(1, 0.0)
    check_hold(receivers, before)


def test_bad_arguments_are_refused(
    relays: list[RelayProcess],
    weights: Weights,
    threads: ThreadPoolExecutor,
    start_senders: StartSenders,
    start_receivers: StartReceivers,
) -> None:
    with pytest.raises(ValueError, match="got 0 relays, rank 0 of 1"):
        peer_first([], 0, 1)
    with pytest.raises(ValueError, match="rank 4 of 4"):
        ModelReceiver(urls_of(relays), "run", rank=RANKS, num_ranks=RANKS)
    with pytest.raises(ValueError, match="receiver"):
        ModelSender(weights, urls_of(relays), "run", rank=0, num_ranks=1, receivers=["a/b"])
    senders, receivers = start_senders(urls_of(relays)), start_receivers(urls_of(relays))
    with pytest.raises(ValueError, match="not received"):
        receivers[0].load_into(weights)
    sent = send_all(threads, senders)
    receive_all(threads, receivers, 0)
    [each.result() for each in sent]
    wrong = {**weights, "layer3.weight": torch.zeros(60, 50)}
    with pytest.raises(ValueError, match=r"layer3\.weight is F32"):
        receivers[0].load_into(wrong)
    with pytest.raises(ValueError, match=r"no tensor layer0\.weight"):
        receivers[0].load_into({})


@pytest.mark.slow
def test_ranks_spread_evenly_over_the_nodes_relays() -> None:
    order = [peer_first(["a", "b"], rank, 4) for rank in range(4)]
    assert order == ["a,b", "a,b", "b,a", "b,a"]
    assert len({peer_first(list("abcdefgh"), rank, 8)[0] for rank in range(8)}) == 8
