"""Sixteen Megatron-style trainer ranks publish one run: each sends its share, and all bits arrive."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from relay_process import stored
from safetensors.torch import save_file
from training_steps import Weights

from rose.errors import FrameError, RelayError
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.follow.shared_mirror import SharedMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.manifest import Manifest, pack_body, unpack_body
from rose.transfer.format.shard_plan import Box
from rose.transfer.format.shared_planes import PlanesFile
from rose.transfer.publish.publisher import SyncReport, WeightPublisher
from rose.transfer.publish.torch_source import TensorShard
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD, VOCABULARY, LAYERS = 16, 48, 16, 8, 2, 72, 4
TRAIN_TP, TRAIN_PP = 8, 2


def full_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (VOCABULARY, HIDDEN),
        "head": (VOCABULARY, HIDDEN),
        "norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"{layer}.q": (HEADS * HEAD, HIDDEN),
            f"{layer}.k": (KV_HEADS * HEAD, HIDDEN),
            f"{layer}.v": (KV_HEADS * HEAD, HIDDEN),
            f"{layer}.o": (HIDDEN, HEADS * HEAD),
            f"{layer}.gate": (WIDTH, HIDDEN),
            f"{layer}.up": (WIDTH, HIDDEN),
            f"{layer}.down": (HIDDEN, WIDTH),
            f"{layer}.norm": (HIDDEN,),
        }
    return shapes


SHAPES = full_shapes()


class MegatronRank:
    """Holds one trainer rank's parameters, fused like Megatron's, and their views as Hugging Face shards."""

    def __init__(self, tp: int, pp: int, full: Weights) -> None:
        self.tp, self.pp = tp, pp
        self.parameters: Weights = {}
        self.shards: list[tuple[str, TensorShard]] = []
        for layer in range(pp * LAYERS // TRAIN_PP, (pp + 1) * LAYERS // TRAIN_PP):
            self._add_qkv(layer, full)
            self._add_mlp(layer, full)
            self._add(f"{layer}.o", full, dim=1)
            self._add(f"{layer}.down", full, dim=1)
            self._add(f"{layer}.norm", full, dim=None)
        if pp == 0:
            self._add("embed", full, dim=0)
        else:
            self._add("head", full, dim=0)
            self._add("norm", full, dim=None)

    def _add(self, name: str, full: Weights, dim: int | None) -> None:
        start = [0] * full[name].dim()
        tensor = full[name]
        if dim is not None:
            size = tensor.shape[dim] // TRAIN_TP
            start[dim] = self.tp * size
            tensor = tensor.narrow(dim, start[dim], size)
        self.parameters[name] = tensor.clone()
        self._share(name, self.parameters[name], tuple(start))

    def _share(self, name: str, view: torch.Tensor, start: tuple[int, ...]) -> None:
        self.shards.append((name, TensorShard(tensor=view, shape=SHAPES[name], start=start)))

    def _add_qkv(self, layer: int, full: Weights) -> None:
        """Joins, for each group, its query heads, its key head and its value head."""
        groups, per_group = KV_HEADS // TRAIN_TP, HEADS // KV_HEADS
        rows = []
        for group in range(self.tp * groups, (self.tp + 1) * groups):
            rows.append(full[f"{layer}.q"][group * per_group * HEAD : (group + 1) * per_group * HEAD])
            rows += [full[f"{layer}.{name}"][group * HEAD : (group + 1) * HEAD] for name in "kv"]
        fused = self.parameters[f"{layer}.qkv"] = torch.cat(rows)
        by_group = fused.view(groups, (per_group + 2) * HEAD, HIDDEN)
        for number in range(groups):
            group = self.tp * groups + number
            query, key, value = torch.split(by_group[number], [per_group * HEAD, HEAD, HEAD])
            self._share(f"{layer}.q", query, (group * per_group * HEAD, 0))
            self._share(f"{layer}.k", key, (group * HEAD, 0))
            self._share(f"{layer}.v", value, (group * HEAD, 0))

    def _add_mlp(self, layer: int, full: Weights) -> None:
        """Joins gate and up, which are cut in the same way."""
        size = WIDTH // TRAIN_TP
        rows = [full[f"{layer}.{name}"][self.tp * size : (self.tp + 1) * size] for name in ("gate", "up")]
        fused = self.parameters[f"{layer}.gate_up"] = torch.cat(rows)
        for name, view in zip(("gate", "up"), torch.split(fused, size), strict=True):
            self._share(f"{layer}.{name}", view, (self.tp * size, 0))


class Trainer:
    """Runs all sixteen ranks in threads, each with its own publisher; they meet only in the relay."""

    def __init__(self, url: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.full = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        self.ranks = [MegatronRank(tp, pp, self.full) for pp in range(TRAIN_PP) for tp in range(TRAIN_TP)]
        self.threads = ThreadPoolExecutor(len(self.ranks))

        def open_rank(rank: int) -> WeightPublisher:
            return WeightPublisher(
                self.ranks[rank].shards,
                url,
                "run",
                rank=rank,
                num_ranks=len(self.ranks),
                bucket_bytes=600,
                snapshot_every=3,
            )

        self.publishers = list(self.threads.map(open_rank, range(len(self.ranks))))

    def step(self, size: float = 1e-3) -> None:
        """Changes every element as a trainer on one machine would: replicas of a norm stay equal."""
        noise = {
            name: size * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
            for number, (name, tensor) in enumerate(self.full.items())
        }
        for name, tensor in self.full.items():
            tensor += noise[name]
        for rank in self.ranks:
            for name, shard in rank.shards:
                shard.tensor.add_(noise[name][slices(shard.box)])

    def publish(self) -> list[SyncReport]:
        return list(self.threads.map(lambda publisher: publisher.publish(), self.publishers))

    def bits(self) -> dict[str, NDArray[np.uint16]]:
        return {
            name: tensor.to(torch.bfloat16).view(torch.uint16).numpy() for name, tensor in self.full.items()
        }

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        self.threads.shutdown()


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))


@pytest.fixture
def trainer(embedded_url: str) -> Iterator[Trainer]:
    trainer = Trainer(embedded_url)
    yield trainer
    trainer.close()


@pytest.fixture
def relay(embedded_url: str) -> Iterator[Relay]:
    relay = open_relay(embedded_url)
    yield relay
    relay.close()


def check_holds(follower: Follower, trainer: Trainer) -> None:
    """Checks every element, bit for bit."""
    follower.mirror.check_integrity()
    held = {name: np.zeros(shape, np.uint16) for name, shape in SHAPES.items()}
    assert follower.mirror.planes is not None
    follower.mirror.planes.read_into(held)
    for name, bits in trainer.bits().items():
        assert np.array_equal(held[name], bits), name


def test_every_bucket_has_one_publisher_and_no_rank_gathers(trainer: Trainer, relay: Relay) -> None:
    trainer.publish()
    shares = [publisher._planes.held for publisher in trainer.publishers]
    layout = trainer.publishers[0].layout
    assert sum(len(share) for share in shares) == len(layout.buckets)
    assert frozenset().union(*shares) == frozenset(range(len(layout.buckets)))
    assert len({publisher.layout.digest for publisher in trainer.publishers}) == 1
    manifest = unpack_body(stored(relay, keys.manifest_key("run", 0, None)), Manifest, "")
    loads = [sum(layout.buckets[index].num_elements for index in share) for share in shares]
    assert sum(loads) == layout.num_elements == manifest.num_elements
    assert max(loads) < 1.3 * min(loads)


@pytest.mark.slow
def test_followers_get_every_bit_of_what_the_ranks_send(trainer: Trainer, relay: Relay) -> None:
    follower = Follower(relay, "run", WeightMirror())
    for number in range(5):
        reports = trainer.publish()
        assert {report.version.number for report in reports} == {number}
        assert follower.advance() and not follower.advance()
        assert {report.state_hash for report in reports} == {str(follower.mirror.state_hash)}
        check_holds(follower, trainer)
        trainer.step()
    trainer.publish()
    late = Follower(relay, "run", WeightMirror())
    assert late.advance()
    check_holds(late, trainer)


def test_a_shared_mirror_puts_cut_tensors_together(trainer: Trainer, relay: Relay, tmp_path: Path) -> None:
    trainer.publish()
    store = SharedMirror(tmp_path)
    follower = Follower(relay, "run", WeightMirror(store=store))
    follower.advance()
    update = store.update_from(None)
    assert update is not None
    path = Path(update.path)
    file = PlanesFile(path)
    assert file.state_hash() == follower.mirror.state_hash == follower.mirror.version_hash
    specs = {spec.name: spec for spec in file.layout.tensors}
    for name, bits in trainer.bits().items():
        assert np.array_equal(file.tensor(specs[name]), bits)
    # Changing a byte changes the hash.
    norm = file.tensor(specs["norm"]).tobytes()
    with path.open("r+b") as data:
        content = data.read()
        at = content.index(norm)
        data.seek(at)
        data.write(bytes([content[at] ^ 1]))
    assert file.state_hash() != follower.mirror.state_hash
    file.close()
    store.close()


def test_a_mirror_refuses_a_manifest_that_leaves_a_bucket_out(trainer: Trainer, relay: Relay) -> None:
    trainer.publish()
    follower = Follower(relay, "run", WeightMirror())
    follower.advance()
    # The change is so small that no snapshot follows, which would offer another path to version 1.
    trainer.step(1e-5)
    trainer.publish()
    key = keys.manifest_key("run", 1, 0)
    manifest = unpack_body(stored(relay, key), Manifest, key)
    assert relay.get(keys.manifest_key("run", 1, None)) is None
    for left_out in range(0, len(manifest.buckets), 7):
        buckets = [*manifest.buckets[:left_out], *manifest.buckets[left_out + 1 :]]
        relay.upsert(key, pack_body(manifest.model_copy(update={"buckets": buckets})))
        with pytest.raises((FrameError, RelayError)):
            follower.advance()
        assert str(follower.mirror.version) == "run/0"
        follower.mirror.check_integrity()
    relay.upsert(key, pack_body(manifest))
    assert follower.advance()


@pytest.mark.slow
def test_when_one_rank_fails_nothing_is_committed_and_all_continue_together(
    trainer: Trainer, relay: Relay
) -> None:
    trainer.publish()
    trainer.step()
    source = trainer.publishers[5]._source
    kept, source._shards = source._shards, {}
    for publisher in trainer.publishers:
        publisher._ranks._timeout_s = 1.0
    attempts = [trainer.threads.submit(publisher.publish) for publisher in trainer.publishers]
    failures = [attempt.exception() for attempt in attempts]
    assert isinstance(failures[5], ValueError) and isinstance(failures[0], RelayError)
    assert all(failures) and {str(publisher.version) for publisher in trainer.publishers} == {"run/0"}
    source._shards = kept
    for publisher in trainer.publishers:
        publisher._ranks._timeout_s = 120.0
    trainer.step()
    assert {report.version.number for report in trainer.publish()} == {1}
    follower = Follower(relay, "run", WeightMirror())
    assert follower.advance()
    check_holds(follower, trainer)


def test_ranks_that_contradict_each_other_are_refused(embedded_url: str) -> None:
    tensor = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="rank 3 of 2"):
        WeightPublisher({"a": tensor}, embedded_url, "run", rank=3, num_ranks=2)
    with pytest.raises(RelayError, match="no shards of rank 1"):
        WeightPublisher({"a": tensor}, embedded_url, "run", rank=0, num_ranks=2, ranks_timeout_s=0.1)


def _attempt(url: str, rank: int, *shards: TensorShard) -> None:
    WeightPublisher([("a", shard) for shard in shards], url, "run", rank=rank, num_ranks=2).close()


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (range(3, 4), 4, "no trainer rank holds all of .* a"),
        (range(2, 4), 5, r"shape=\(4, 5\).*shape=\(4, 4\)"),
    ],
)
def test_a_missing_shard_and_another_shape_are_refused_by_every_rank(
    embedded_url: str, rows: range, columns: int, message: str
) -> None:
    first = TensorShard(tensor=torch.zeros(2, 4), shape=(4, 4), start=(0, 0))
    part = torch.zeros(len(rows), columns)
    second = TensorShard(tensor=part, shape=(4, columns), start=(rows.start, 0))
    with ThreadPoolExecutor(2) as threads:
        attempts = [threads.submit(_attempt, embedded_url, *each) for each in ((0, first), (1, second))]
        for attempt in attempts:
            with pytest.raises(ValueError, match=message):
                attempt.result()


def test_ranks_of_which_one_lacks_the_checkpoint_are_told_to_share_it(
    embedded_url: str, tmp_path: Path
) -> None:
    weights = {"a": torch.zeros(4, 4), "decay": torch.zeros(4)}
    save_file({**weights, "a": weights["a"].bfloat16()}, tmp_path / "model.safetensors")

    def attempt(rank: int) -> None:
        folder = (tmp_path, tmp_path / "nothing")[rank]
        WeightPublisher(weights, embedded_url, "run", rank=rank, num_ranks=2, checkpoint=folder).close()

    with ThreadPoolExecutor(2) as threads:
        for failed in [threads.submit(attempt, rank) for rank in range(2)]:
            with pytest.raises(
                ValueError, match=r"decay.*give all ranks the same dtype and the same checkpoint"
            ):
                failed.result()
