"""From trainer to mirror over real relays, every version arrives bit for bit, by whatever path."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from relay_process import CAPACITY_BYTES, StartRelay, stored, wait_folded

from rose.errors import FrameError, RelayError
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import leases
from rose.transfer.format import manifest as keys
from rose.transfer.format.codec import Codec
from rose.transfer.format.manifest import Ack, Head, pack_body, unpack_body
from rose.transfer.publish.publisher import SNAPSHOT_EVERY, SyncReport, WeightPublisher
from rose.transfer.publish.torch_source import TensorShard
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay

Publish = Callable[..., WeightPublisher]


class TiedModel(torch.nn.Module):
    """A model whose embedding and head share one tensor, as in small Qwen models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(300, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.head = torch.nn.Linear(64, 300, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))

    def train_step(self, change: float = 1e-4) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(change * torch.randn_like(parameter))

    def bf16_bits(self) -> dict[str, torch.Tensor]:
        state = self.state_dict()
        del state["head.weight"]
        return {name: tensor.to(torch.bfloat16).view(torch.uint16) for name, tensor in state.items()}


@pytest.fixture
def model() -> TiedModel:
    return TiedModel()


@pytest.fixture
def publish(relay_url: str, model: TiedModel) -> Iterator[Publish]:
    """Makes publishers of the model and closes them."""
    made: list[WeightPublisher] = []

    def make(
        run_id: str | None = None, codec: Codec | None = None, snapshot_every: int = SNAPSHOT_EVERY
    ) -> WeightPublisher:
        made.append(WeightPublisher(model, relay_url, run_id, codec=codec, snapshot_every=snapshot_every))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


def check_holds(mirror: WeightMirror, model: TiedModel, report: SyncReport) -> None:
    assert mirror.version == report.version and str(mirror.state_hash) == report.state_hash
    mirror.check_integrity()
    assert mirror.planes is not None
    held = {spec.name: np.zeros(spec.shape, np.uint16) for spec in mirror.planes.layout.tensors}
    mirror.planes.read_into(held)
    expected = model.bf16_bits()
    assert set(held) == set(expected)
    for spec in mirror.planes.layout.tensors:
        assert spec.dtype == "BF16"
        assert torch.from_numpy(held[spec.name]).equal(expected[spec.name]), spec.name


@pytest.mark.parametrize("codec", [None, *Codec])
def test_every_version_arrives_bit_for_bit(
    publish: Publish, relay: Relay, model: TiedModel, codec: Codec | None
) -> None:
    publisher = publish(run_id="run", codec=codec)
    follower = Follower(relay, "run", WeightMirror())
    assert not follower.advance()
    report = publisher.publish()
    assert report.base is None and report.num_changed == report.num_elements
    for number in range(4):
        assert follower.advance() and not follower.advance()
        check_holds(follower.mirror, model, report)
        model.train_step()
        report = publisher.publish()
        assert (report.version.number, report.base) == (number + 1, number)
        assert report.coo_bytes == 6 * report.num_changed > 0


def test_special_values_and_unchanged_weights_arrive(
    publish: Publish, relay: Relay, model: TiedModel
) -> None:
    publisher = publish(run_id="run")
    follower = Follower(relay, "run", WeightMirror())
    publisher.publish()
    follower.advance()
    assert publisher.publish().num_changed == 0
    with torch.no_grad():
        model.embed.weight[0, :5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0])
    report = publisher.publish()
    assert report.num_changed == 5
    assert follower.advance()
    check_holds(follower.mirror, model, report)


def test_a_follower_that_skipped_versions_applies_their_deltas(
    publish: Publish, relay: Relay, model: TiedModel
) -> None:
    publisher = publish(run_id="run")
    follower = Follower(relay, "run", WeightMirror())
    publisher.publish()
    follower.advance()
    for _ in range(3):
        model.train_step(1e-6)
        report = publisher.publish()
    before = follower.fetched_bytes
    assert follower.advance()
    assert follower.fetched_bytes - before < report.dense_bytes
    check_holds(follower.mirror, model, report)


def test_a_late_joiner_starts_at_the_latest_snapshot(
    publish: Publish, relay: Relay, model: TiedModel
) -> None:
    publisher = publish(run_id="run", snapshot_every=3)
    early = Follower(relay, "run", WeightMirror())
    for number in range(8):
        model.train_step(1e-7)
        report = publisher.publish()
        assert report.snapshot_bytes == 0
        if number in (3, 6):
            wait_folded(relay, "run", number)
        early.advance()
    late = Follower(relay, "run", WeightMirror())
    assert unpack_body(stored(relay, keys.head_key("run")), Head, "HEAD").snapshot == 6
    assert late.advance()
    check_holds(late.mirror, model, report)
    check_holds(early.mirror, model, report)


def test_a_worker_two_snapshots_behind_is_not_waited_for(
    publish: Publish, relay: Relay, model: TiedModel
) -> None:
    publisher = publish(run_id="run", snapshot_every=1)
    follower = Follower(relay, "run", WeightMirror())
    publisher.publish()
    follower.advance()
    relay.upsert(keys.ack_prefix("run") + "w", pack_body(Ack(worker="w", version=0, state_hash="")))
    for number in range(1, 5):
        model.train_step()
        report = publisher.publish()
        wait_folded(relay, "run", number)
    head = unpack_body(stored(relay, keys.head_key("run")), Head, "HEAD")
    assert (head.version, head.snapshot, head.oldest_base) == (4, 3, 2)
    assert follower.advance()
    check_holds(follower.mirror, model, report)


def test_a_lost_delta_sends_the_follower_to_the_snapshot(
    publish: Publish, relay: Relay, model: TiedModel
) -> None:
    publisher = publish(run_id="run", snapshot_every=2)
    follower = Follower(relay, "run", WeightMirror())
    publisher.publish()
    follower.advance()
    relay.upsert(keys.ack_prefix("run") + "w", pack_body(Ack(worker="w", version=0, state_hash="")))
    for number in range(1, 4):
        model.train_step()
        report = publisher.publish()
        if number == 2:
            wait_folded(relay, "run", 2)
    relay.remove(relay.keys("rose/run/2-1/"))
    assert follower.advance()
    check_holds(follower.mirror, model, report)


def test_a_corrupt_object_leaves_the_mirror_on_its_version(
    publish: Publish, relay: Relay, model: TiedModel
) -> None:
    publisher = publish(run_id="run")
    follower = Follower(relay, "run", WeightMirror())
    report = publisher.publish()
    follower.advance()
    model.train_step()
    publisher.publish()
    # The path over the snapshot needs this delta too, so no path leads to HEAD.
    key = keys.bucket_key("run", 1, 0, 0)
    data = bytearray(stored(relay, key))
    data[len(data) // 2] ^= 1
    relay.upsert(key, bytes(data))
    with pytest.raises(FrameError, match="checksum"):
        follower.advance()
    follower.mirror.check_integrity()
    assert follower.mirror.version == report.version
    assert str(follower.mirror.state_hash) == report.state_hash


def test_auto_followers_move_to_the_run_of_a_restarted_trainer(
    publish: Publish, relay: Relay, model: TiedModel
) -> None:
    follower = Follower(relay, "auto", WeightMirror())
    first = publish(run_id="first")
    first.publish()
    assert follower.advance() and str(follower.mirror.version) == "first/0"
    first.close()
    second = publish()
    assert not follower.advance()
    model.train_step()
    report = second.publish()
    assert follower.advance()
    check_holds(follower.mirror, model, report)


def test_a_base_checkpoint_with_the_snapshots_bits_saves_the_snapshot(
    publish: Publish, relay: Relay, model: TiedModel, tmp_path: Path
) -> None:
    publisher = publish(run_id="run")
    publisher.publish()
    model_bits = {name: bits.view(torch.bfloat16) for name, bits in model.bf16_bits().items()}
    safetensors.torch.save_file(model_bits, tmp_path / "model.safetensors")
    model.train_step(1e-7)
    report = publisher.publish()
    follower = Follower(relay, "run", WeightMirror(), base_checkpoint=tmp_path)
    assert follower.advance()
    assert follower.fetched_bytes < report.dense_bytes / 4
    other = Follower(relay, "run", WeightMirror(), base_checkpoint=tmp_path / "nowhere")
    assert other.advance() and other.fetched_bytes > report.dense_bytes
    assert other.mirror.state_hash == follower.mirror.state_hash == publisher.state_hash


def test_a_run_id_is_used_once(publish: Publish, relay: Relay) -> None:
    publish(run_id="run").publish()
    with pytest.raises(RelayError, match="run run is in this relay already"):
        publish(run_id="run")


def test_a_failed_publish_changes_nothing_and_can_be_repeated(
    start_relay: StartRelay, model: TiedModel
) -> None:
    url = start_relay("embedded").url
    relay = open_relay(url)
    publisher = WeightPublisher(model, url, "run", snapshot_every=1, full_wait_s=0)
    follower = Follower(relay, "run", WeightMirror())
    publisher.publish()
    follower.advance()
    relay.put("filler", bytes(64 * 2**20 - sum(len(stored(relay, k)) for k in relay.keys("")) - 3000))
    model.train_step()
    with pytest.raises(RelayError, match="free of"):
        publisher.publish()
    assert str(publisher.version) == "run/0" and not follower.advance()
    model.train_step()
    relay.remove(["filler"])
    report = publisher.publish()
    assert report.version.number == 1 and follower.advance()
    check_holds(follower.mirror, model, report)
    publisher.close()
    relay.close()


@pytest.mark.slow
def test_a_full_relay_is_waited_for_until_acknowledgements_make_room(
    start_relay: StartRelay, model: TiedModel
) -> None:
    url = start_relay("embedded").url
    relay = open_relay(url)
    publisher = WeightPublisher(model, url, "run", snapshot_every=2, snapshot_share=10, full_wait_s=300)
    follower = Follower(relay, "run", WeightMirror())
    relay.upsert(keys.ack_prefix("run") + "w", pack_body(Ack(worker="w", version=0, state_hash="")))
    for number in range(4):
        model.train_step()
        publisher.publish()
        follower.advance()
        if number == 2:
            wait_folded(relay, "run", 2)
    # The worker needs the chain from version 0, although there is a snapshot of version 2.
    filled = sum(len(stored(relay, key)) for key in relay.keys(""))
    relay.put("filler", bytes(CAPACITY_BYTES - filled - 3000))
    model.train_step()
    with ThreadPoolExecutor() as executor:
        publishing = executor.submit(publisher.publish)
        with pytest.raises(TimeoutError):
            publishing.result(timeout=0.3)
        relay.upsert(keys.ack_prefix("run") + "w", pack_body(Ack(worker="w", version=2, state_hash="")))
        report = publishing.result()
    assert report.version.number == 4 and follower.advance()
    check_holds(follower.mirror, model, report)
    publisher.close()
    relay.close()


def test_a_relay_that_came_back_empty_is_filled_again(
    embedded_url: str, model: TiedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "BEAT_S", 1e6)  # the publish fills it, not the lease
    relay = open_relay(embedded_url)
    publisher = WeightPublisher(model, embedded_url, "run")
    early = Follower(relay, "auto", WeightMirror())
    for _ in range(2):
        publisher.publish()
        early.advance()
        model.train_step()
    relay.remove(relay.keys(""))
    assert not early.advance()
    report = publisher.publish()
    assert report.snapshot_bytes > 0
    late = Follower(relay, "auto", WeightMirror())
    for follower in (early, late):
        assert follower.advance()
        check_holds(follower.mirror, model, report)
    publisher.close()
    relay.close()


def test_bad_arguments_are_refused(relay_url: str, model: TiedModel) -> None:
    with pytest.raises(ValueError, match="run id"):
        WeightPublisher(model, relay_url, "a/b")
    with pytest.raises(ValueError, match="dtype"):
        WeightPublisher(model, relay_url, dtype="int4")
    with pytest.raises(ValueError, match="int64"):
        WeightPublisher({"steps": torch.zeros(1, dtype=torch.int64)}, relay_url)
    with pytest.raises(ValueError, match="encode_threads must be >= 1, got 0"):
        WeightPublisher(model, relay_url, encode_threads=0)
    with pytest.raises(ValueError, match="no tensors"):
        WeightPublisher({}, relay_url)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (torch.zeros(8, 5, dtype=torch.bfloat16), r"b is BF16 \(8, 5\), the run began with BF16 \(4, 5\)"),
        (torch.zeros(4, 5, dtype=torch.float32), r"b is F32 \(4, 5\), the run began with BF16 \(4, 5\)"),
    ],
)
def test_a_tensor_that_changes_its_shape_or_dtype_is_refused_and_named(
    embedded_url: str, changed: torch.Tensor, message: str
) -> None:
    weights = {name: torch.zeros(4, 5, dtype=torch.bfloat16) for name in "abc"}
    publisher = WeightPublisher(weights, embedded_url, "run", dtype=None)
    report = publisher.publish()
    kept, weights["b"].data = weights["b"].data, changed
    with pytest.raises(ValueError, match=message):
        publisher.publish()
    assert publisher.version == report.version
    weights["b"].data = kept
    weights["b"][0, 0] = 1
    assert publisher.publish().num_changed == 1
    publisher.close()


def test_a_version_is_fetched_while_it_is_being_written(embedded_url: str) -> None:
    rows = 50
    ranks = [torch.randn(rows, 20).to(torch.bfloat16) for _ in range(2)]

    def open_rank(rank: int) -> WeightPublisher:
        shard = TensorShard(tensor=ranks[rank], shape=(2 * rows, 20), start=(rank * rows, 0))
        return WeightPublisher(
            [("w", shard)], embedded_url, "run", rank=rank, num_ranks=2, bucket_bytes=500, snapshot_share=10
        )

    relay = open_relay(embedded_url)
    follower = Follower(relay, "run", WeightMirror())
    with ThreadPoolExecutor(2) as executor:
        publishers = list(executor.map(open_rank, range(2)))
        list(executor.map(lambda publisher: publisher.publish(), publishers))
        assert follower.advance()
        fetched = follower.fetched_bytes
        for tensor in ranks:
            tensor += 1
        # Rank 0 has put its frames and waits for rank 1.
        first = executor.submit(publishers[0].publish)
        while follower.fetched_bytes == fetched:
            assert not follower.advance()
            follower.wait(60.0)
        assert str(follower.mirror.version) == "run/0"
        publishers[1].publish()
        report = first.result()
        while not follower.advance():
            follower.wait(60.0)
    assert follower.mirror.version == report.version and str(follower.mirror.state_hash) == report.state_hash
    follower.mirror.check_integrity()
    frames = [key for key in relay.keys(keys.version_prefix("run", 1, 0)) if keys.bucket_of(key) is not None]
    assert follower.fetched_bytes - fetched == sum(len(stored(relay, key)) for key in frames)
    for publisher in publishers:
        publisher.close()
    relay.close()
