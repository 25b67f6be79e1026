"""A follower that has the trainer's public key takes nothing that the trainer did not sign."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from relay_process import StartRelay, stored
from training_steps import Weights

from rose.errors import ConfigError, FrameError, RelayError
from rose.signature import Signer, Verifier, body_of, make_signing_key
from rose.transfer.follow.follower import AUTO_RUN, Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.codec import Codec
from rose.transfer.format.frame import Frame
from rose.transfer.format.manifest import Head, Manifest, pack_body, unpack_body
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.publish.torch_source import TensorShard
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay
from rose.transfer.relay.server import main

pytest.importorskip("cryptography", reason="cryptography is not installed")

SIGNING_KEY = make_signing_key()
PUBLIC_KEY = Signer(SIGNING_KEY).public_key
NUM_ROWS = 40


def bits_of(mirror: WeightMirror) -> dict[str, list[int]]:
    assert mirror.planes is not None
    held = {spec.name: np.zeros(spec.shape, np.uint16) for spec in mirror.planes.layout.tensors}
    mirror.planes.read_into(held)
    return {name: bits.reshape(-1).tolist() for name, bits in held.items()}


def train(weights: Weights) -> None:
    for tensor in weights.values():
        tensor += 0.01 * torch.randn_like(tensor)


def expected(weights: Weights) -> dict[str, list[int]]:
    return {
        name: tensor.to(torch.bfloat16).view(torch.uint16).reshape(-1).tolist()
        for name, tensor in weights.items()
    }


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(0)
    return {name: torch.randn(NUM_ROWS, 8) for name in "abc"}


Publish = Callable[..., WeightPublisher]


@pytest.fixture
def publish(embedded_url: str, weights: Weights) -> Iterator[Publish]:
    made: list[WeightPublisher] = []

    def make(signing_key: str | None = SIGNING_KEY, run_id: str = "run") -> WeightPublisher:
        made.append(
            WeightPublisher(
                weights,
                embedded_url,
                run_id,
                bucket_bytes=512,
                snapshot_every=3,
                snapshot_share=100.0,
                signing_key=signing_key,
            )
        )
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


@pytest.fixture
def embedded(embedded_url: str) -> Iterator[Relay]:
    client = open_relay(embedded_url)
    yield client
    client.close()


def follower_of(relay: Relay, run_id: str = "run") -> Follower:
    return Follower(relay, run_id, WeightMirror(), public_key=PUBLIC_KEY)


def test_a_signed_run_reaches_followers_with_and_without_the_public_key(
    publish: Publish, embedded: Relay, weights: Weights
) -> None:
    publisher = publish()
    followers = [follower_of(embedded), Follower(embedded, "run", WeightMirror())]
    for number in range(8):
        report = publisher.publish()
        for follower in followers:
            assert follower.advance()
            assert bits_of(follower.mirror) == expected(weights)
        # A relay can't sign what it folds: the trainer sends the snapshots.
        assert (report.snapshot_bytes > 0) == (number in (3, 6))
        assert not any(keys.fold_of(key) for key in embedded.keys("rose/run/"))
        train(weights)
    late = follower_of(embedded)
    assert late.advance() and late.mirror.version == publisher.version


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_whatever_was_changed_in_the_relay_is_refused_and_the_old_version_stays(
    publish: Publish, embedded: Relay, weights: Weights
) -> None:
    publisher = publish()
    publisher.publish()
    follower = follower_of(embedded)
    assert follower.advance()
    held = bits_of(follower.mirror)
    train(weights)
    publisher.publish()
    manifest_key, frame_key = keys.manifest_key("run", 1, 0), keys.bucket_key("run", 1, 0, 0)
    first_key, layout_key = keys.manifest_key("run", 0, None), keys.layout_key("run")
    good = {key: stored(embedded, key) for key in (manifest_key, frame_key, first_key, layout_key)}
    body = unpack_body(good[manifest_key], Manifest, manifest_key)
    other = Signer(make_signing_key())
    forged: list[tuple[str, bytes, str]] = [
        (manifest_key, flip(good[manifest_key]), "MANIFEST has a signature that does not belong"),
        (manifest_key, body_of(good[manifest_key]), "MANIFEST is not signed; set ROSE_SIGNING_KEY"),
        (manifest_key, other.seal(manifest_key, pack_body(body)), "does not belong to ROSE_PUBLIC_KEY"),
        (manifest_key, good[first_key], "does not belong to ROSE_PUBLIC_KEY"),
        (manifest_key, b"rose-signed ?\n" + pack_body(body), "does not belong to ROSE_PUBLIC_KEY"),
    ]
    for key, data, message in forged:
        embedded.upsert(key, data)
        with pytest.raises((RelayError, FrameError), match=message):
            follower.advance()
        assert str(follower.mirror.version) == "run/0" and bits_of(follower.mirror) == held
        embedded.upsert(key, good[key])
    embedded.upsert(layout_key, body_of(good[layout_key]))
    with pytest.raises(RelayError, match="LAYOUT is not signed"):
        follower_of(embedded).advance()
    embedded.upsert(layout_key, good[layout_key])
    assert follower.advance() and bits_of(follower.mirror) == expected(weights)


def test_a_frame_of_the_same_bits_in_other_bytes_is_refused(
    publish: Publish, embedded: Relay, weights: Weights
) -> None:
    """Its checksums and hashes are right: whoever can write to a relay can make them."""
    publisher, twin = publish(), publish(signing_key=None, run_id="twin")
    for each in (publisher, twin):
        each.publish()
    follower = follower_of(embedded)
    assert follower.advance()
    train(weights)
    for each in (publisher, twin):
        each.publish()
    frame_key = keys.bucket_key("run", 1, 0, 0)
    good = stored(embedded, frame_key)
    embedded.upsert(frame_key, stored(embedded, keys.bucket_key("twin", 1, 0, 0)))
    with pytest.raises(FrameError, match=r"rose/run/1-0/0: its SHA-256 is .*, the trainer signed"):
        follower.advance()
    assert str(follower.mirror.version) == "run/0"
    embedded.upsert(frame_key, good)
    assert follower.advance() and bits_of(follower.mirror) == expected(weights)


def test_frames_that_were_read_ahead_are_fetched_again_where_the_manifest_names_others(
    publish: Publish, embedded: Relay, weights: Weights
) -> None:
    publisher = publish()
    publisher.publish()
    follower = follower_of(embedded)
    assert follower.advance()
    train(weights)
    publisher.publish()
    manifest_key, head_key = keys.manifest_key("run", 1, 0), keys.head_key("run")
    head = unpack_body(stored(embedded, head_key), Head, head_key)
    at_first = {"version": 0, "coming": 1, "state_hash": str(follower.mirror.state_hash)}
    embedded.upsert(head_key, pack_body(head.model_copy(update=at_first)))
    assert not follower.advance() and follower.mirror.buckets_ahead
    fetched = follower.fetched_bytes
    manifest = unpack_body(stored(embedded, manifest_key), Manifest, manifest_key)
    entries = [entry.model_copy(update={"digest": "0" * 64}) for entry in manifest.buckets]
    wrong = manifest.model_copy(update={"buckets": entries})
    right = stored(embedded, manifest_key)
    embedded.upsert(manifest_key, Signer(SIGNING_KEY).seal(manifest_key, pack_body(wrong)))
    embedded.upsert(head_key, pack_body(head))
    with pytest.raises(FrameError, match="the trainer signed 0000"):
        follower.advance()
    assert follower.fetched_bytes > fetched and str(follower.mirror.version) == "run/0"
    embedded.upsert(manifest_key, right)
    assert follower.advance() and bits_of(follower.mirror) == expected(weights)


def zeros_frame(mirror: WeightMirror, number: int) -> bytes:
    """Returns a frame of the next version that sets this bucket to zeros, from what the mirror has there."""
    assert mirror.planes is not None and mirror.version is not None
    layout = mirror.planes.layout
    bucket, zeros = layout.buckets[number], WeightPlanes(layout)
    zeros.fill(bucket, np.zeros(bucket.num_elements, np.uint16))
    return Frame.of(
        layout,
        bucket,
        mirror.version.run_id,
        mirror.version.number,
        mirror.version.number + 1,
        codec=Codec.DENSE,
        payload=bytes(2 * bucket.num_elements),
        num_changed=int(np.count_nonzero(mirror.planes.bits(bucket))),
        before=mirror.planes.bucket_hash(bucket),
        after=zeros.bucket_hash(bucket),
    ).pack()


def test_a_frame_that_names_another_bucket_than_its_key_replaces_none_that_was_read_ahead(
    publish: Publish, embedded: Relay, weights: Weights
) -> None:
    publisher = publish()
    publisher.publish()
    follower = follower_of(embedded)
    assert follower.advance()
    train(weights)
    publisher.publish()
    head_key, late_key = keys.head_key("run"), keys.bucket_key("run", 1, 0, 1)
    head, late = stored(embedded, head_key), stored(embedded, late_key)
    at_first = {"version": 0, "coming": 1, "state_hash": str(follower.mirror.state_hash)}
    embedded.upsert(head_key, pack_body(unpack_body(head, Head, head_key).model_copy(update=at_first)))
    embedded.remove([late_key])
    assert not follower.advance() and 0 in follower.mirror.buckets_ahead
    read = bits_of(follower.mirror)
    embedded.upsert(late_key, zeros_frame(follower.mirror, 0))
    assert not follower.advance() and bits_of(follower.mirror) == read
    embedded.upsert(late_key, late)
    embedded.upsert(head_key, head)
    assert follower.advance() and bits_of(follower.mirror) == expected(weights)


def test_a_signed_run_never_goes_back(publish: Publish, embedded: Relay, weights: Weights) -> None:
    publisher = publish()
    head_key = keys.head_key("run")
    publisher.publish()
    old = unpack_body(stored(embedded, head_key), Head, head_key)
    train(weights)
    publisher.publish()
    follower = follower_of(embedded)
    assert follower.advance()
    embedded.upsert(head_key, pack_body(old.model_copy(update={"writer": "another"})))
    with pytest.raises(RelayError, match=r"names version 0, and this follower has run/1: .*another run id"):
        follower.advance()
    assert str(follower.mirror.version) == "run/1"


@pytest.mark.parametrize("forged", [{"version": 5, "oldest_base": 5}, {"state_hash": "0" * 32}])
def test_a_signed_run_never_goes_back_to_an_older_snapshot(
    publish: Publish, embedded: Relay, weights: Weights, forged: dict[str, object]
) -> None:
    publisher, head_key = publish(), keys.head_key("run")
    for _ in range(3):
        publisher.publish()
        train(weights)
    follower = follower_of(embedded)
    assert follower.advance()
    held, head = bits_of(follower.mirror), stored(embedded, head_key)
    body = unpack_body(head, Head, head_key)
    embedded.upsert(head_key, pack_body(body.model_copy(update=forged)))
    embedded.remove([keys.manifest_key("run", 1, 0)])
    for _ in range(2):
        with pytest.raises(
            (RelayError, FrameError), match=r"names version 0, .*never goes back|deltas led to"
        ):
            follower.advance()
        assert str(follower.mirror.version) == "run/2" and bits_of(follower.mirror) == held
    embedded.upsert(head_key, head)
    publisher.publish()
    assert follower.advance() and follower.mirror.version == publisher.version


def test_a_public_key_needs_the_name_of_the_run(embedded: Relay) -> None:
    with pytest.raises(ConfigError, match=r"ROSE_PUBLIC_KEY needs the name of the run, .*`--run`, or `run:`"):
        follower_of(embedded, AUTO_RUN)


def test_trainer_ranks_take_only_signed_parts_from_each_other(
    embedded_url: str, embedded: Relay, weights: Weights
) -> None:
    half = NUM_ROWS // 2

    def rank(number: int, signing_key: str | None, run_id: str) -> WeightPublisher:
        shards = [
            (
                name,
                TensorShard(
                    tensor=tensor[number * half : (number + 1) * half],
                    shape=tuple(tensor.shape),
                    start=(number * half, 0),
                ),
            )
            for name, tensor in weights.items()
        ]
        return WeightPublisher(
            shards,
            embedded_url,
            run_id,
            rank=number,
            num_ranks=2,
            bucket_bytes=512,
            ranks_timeout_s=20.0,
            signing_key=signing_key,
        )

    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda number: rank(number, SIGNING_KEY, "run"), range(2)))
        list(threads.map(WeightPublisher.publish, ranks))
        follower = follower_of(embedded)
        assert follower.advance() and bits_of(follower.mirror) == expected(weights)
        for each in ranks:
            each.close()
        first = threads.submit(rank, 0, SIGNING_KEY, "other")
        with pytest.raises(RelayError):
            threads.submit(rank, 1, make_signing_key(), "other").result()
        with pytest.raises(RelayError, match="rank/1 has a signature that does not belong"):
            first.result()


def test_a_signature_belongs_to_its_key_and_its_signer() -> None:
    signer, verifier = Signer(SIGNING_KEY), Verifier(PUBLIC_KEY)
    sealed = signer.seal("rose/run/LAYOUT", b"{}\n{}")
    verifier.require_signed("rose/run/LAYOUT", sealed)
    assert body_of(sealed) == b"{}\n{}" and body_of(b"{}\n{}") == b"{}\n{}"
    with pytest.raises(RelayError, match="does not belong"):
        verifier.require_signed("rose/run2/LAYOUT", sealed)
    for bad in ("", "secret", "AAAA", SIGNING_KEY + "A"):
        with pytest.raises(ConfigError, match=r"ROSE_SIGNING_KEY: .*rose relay --make-keys"):
            Signer(bad)
        with pytest.raises(ConfigError, match=r"ROSE_PUBLIC_KEY: a public key is 32 bytes"):
            Verifier(bad)


def test_the_relays_command_prints_a_pair_of_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--make-keys"]) == 0
    lines = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
    assert Signer(lines["ROSE_SIGNING_KEY"]).public_key == lines["ROSE_PUBLIC_KEY"]


def test_a_read_key_follows_and_can_write_nothing_but_acknowledgements(
    start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch, weights: Weights
) -> None:
    monkeypatch.setenv("ROSE_KEY", "writes")
    monkeypatch.setenv("ROSE_READ_KEY", "reads")
    url = start_relay("embedded").url
    publisher = WeightPublisher(weights, url, "run", bucket_bytes=512)
    publisher.publish()
    relay = open_relay(url, "reads")
    follower = Follower(relay, "run", WeightMirror())
    assert follower.advance() and bits_of(follower.mirror) == expected(weights)
    follower.wait(0.01)
    relay.upsert(keys.ack_prefix("run") + "w", b"{}")
    assert relay.get_all(keys.ack_prefix("run")) == {"rose/run/ack/w": b"{}"}
    refused: list[Callable[[], object]] = [
        lambda: relay.put("rose/run/ack/x", b""),
        lambda: relay.upsert("rose/run/HEAD", b""),
        lambda: relay.upsert("rose/run/ack/w/HEAD", b""),
        lambda: relay.upsert("rose/.runs/ack/w", b""),
        lambda: relay.upsert("rose/run/ack/w", bytes(4097)),
        lambda: relay.remove(["rose/run/HEAD"]),
    ]
    for call in refused:
        with pytest.raises(RelayError, match=r"403 ROSE_READ_KEY reads, .* needs the relay's ROSE_KEY"):
            call()
    with pytest.raises(RelayError, match="wrong or missing key"):
        open_relay(url, "guess")
    relay.close()
    publisher.close()


def test_a_relay_hands_nothing_on_for_a_read_key_as_its_own_key_would_go_along(
    start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_KEY", "writes")
    monkeypatch.setenv("ROSE_READ_KEY", "reads")
    first, second = (start_relay("embedded").url for _ in range(2))
    relay, beside = open_relay(first, "reads"), open_relay(second, "reads")
    ack = keys.ack_prefix("run") + "w"
    assert not relay.put_with_copies(ack, b"{}", is_replacing=True, copy_to=[second])
    assert relay.get(ack) == b"{}" and beside.get(ack) is None
    writer = open_relay(first, "writes")
    assert writer.put_with_copies(ack, b"{}", is_replacing=True, copy_to=[second]) == [second]
    both = open_relay(f"{first},{second}", "reads")
    both.upsert(ack, b"later")
    assert relay.get(ack) == beside.get(ack) == b"later"
    for each in (relay, beside, writer, both):
        each.close()
