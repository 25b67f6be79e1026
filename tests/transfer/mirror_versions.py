"""Makes versions of a small set of weights as manifests and frames, and checks what a mirror holds."""

from collections.abc import Sequence

import numpy as np

from rose.transfer.follow.mirror import Fetch, WeightMirror
from rose.transfer.format.codec import Codec, encode
from rose.transfer.format.frame import NO_BASE, Frame, run_digest
from rose.transfer.format.layout import DTYPE_BYTES, Bucket, Layout, TensorSpec
from rose.transfer.format.manifest import BucketEntry, Manifest
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.format.state_hash import StateHash
from rose.types import WeightVersion

LAYOUT = Layout(
    [
        TensorSpec(name="a", dtype="BF16", shape=(300, 7)),
        TensorSpec(name="b", dtype="BF16", shape=(11,)),
        TensorSpec(name="c", dtype="F32", shape=(500,)),
        TensorSpec(name="d", dtype="F8_E4M3", shape=(999,)),
    ],
    bucket_bytes=1000,
)

Version = tuple[Manifest, list[bytes]]
"""A manifest and its frames, in order."""
Part = tuple[Bucket, Codec, bytes, int, StateHash]
"""What a version does to a bucket: the codec, the payload, the number of changes, the hash before it."""


class Versions:
    """A run of versions 0, 1, ... with random changes, as manifests and frames."""

    def __init__(self, codec: Codec, count: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.states = [WeightPlanes(LAYOUT)]
        self.deltas: dict[int, Version] = {}
        for bucket in LAYOUT.buckets:
            top = 256 ** DTYPE_BYTES[bucket.dtype]
            drawn = rng.integers(0, top, bucket.num_elements)
            self.states[0].fill(bucket, drawn.astype(self.states[0].bits(bucket).dtype))
        for number in range(1, count):
            self.states.append(WeightPlanes(LAYOUT))
            for bucket in LAYOUT.buckets:
                bits = self.states[number - 1].bits(bucket).copy()
                if bucket.index % 3:
                    changed = rng.random(bits.size) < 0.05
                    bits[changed] += rng.choice(np.array([1, -1, 77]), int(changed.sum())).astype(bits.dtype)
                self.states[number].fill(bucket, bits)
            self.deltas[number] = self.delta(codec, number)

    def snapshot(self, number: int) -> Version:
        state = self.states[number]
        return self._version(
            number,
            None,
            [
                (bucket, Codec.DENSE, state.bits(bucket).tobytes(), bucket.num_elements, StateHash())
                for bucket in LAYOUT.buckets
            ],
        )

    def delta(self, codec: Codec, number: int) -> Version:
        old, new = self.states[number - 1], self.states[number]
        parts: list[Part] = []
        for bucket in LAYOUT.buckets:
            encoded = encode(codec, old.bits(bucket), new.bits(bucket), bucket.first_index)
            if encoded.num_changed:
                before = old.bucket_hash(bucket)
                parts.append((bucket, codec, encoded.payload, encoded.num_changed, before))
        return self._version(number, number - 1, parts)

    def _version(self, number: int, base: int | None, parts: Sequence[Part]) -> Version:
        state = self.states[number]
        frames = [
            Frame(
                codec=codec,
                width=DTYPE_BYTES[bucket.dtype],
                bucket=bucket.index,
                run=run_digest("run"),
                base=NO_BASE if base is None else base,
                version=number,
                layout=bytes.fromhex(LAYOUT.digest),
                dtype=bucket.dtype,
                num_elements=bucket.num_elements,
                first_index=bucket.first_index,
                num_changed=num_changed,
                base_hash=before,
                new_hash=state.bucket_hash(bucket),
                payload=payload,
            ).pack()
            for bucket, codec, payload, num_changed, before in parts
        ]
        manifest = Manifest(
            run_id="run",
            version=number,
            base=base,
            layout=LAYOUT.digest,
            state_hash=str(state.state_hash),
            base_state_hash=str(self.states[base].state_hash) if base is not None else None,
            num_elements=LAYOUT.num_elements,
            num_changed=sum(part[3] for part in parts),
            is_followed=False,
            buckets=[
                BucketEntry(
                    index=bucket.index,
                    key=f"k{bucket.index}",
                    num_bytes=1,
                    change=str(state.bucket_hash(bucket) - before),
                )
                for bucket, _, _, _, before in parts
            ],
        )
        return manifest, frames


def fetch_from(manifest: Manifest, frames: Sequence[bytes]) -> Fetch:
    by_key = {entry.key: frame for entry, frame in zip(manifest.buckets, frames, strict=True)}
    return lambda entries: iter([by_key[entry.key] for entry in entries])


def apply_delta(mirror: WeightMirror, manifest: Manifest, frames: Sequence[bytes]) -> None:
    mirror.apply_delta(manifest, fetch_from(manifest, frames))


def read_ahead(mirror: WeightMirror, frame: bytes) -> None:
    mirror.read_ahead(frame, Frame.unpack(frame).bucket)


def load_snapshot(mirror: WeightMirror, manifest: Manifest, frames: Sequence[bytes]) -> None:
    mirror.load_snapshot(manifest, LAYOUT, fetch_from(manifest, frames))


def check_holds(mirror: WeightMirror, versions: Versions, number: int) -> None:
    assert mirror.version == WeightVersion(run_id="run", number=number)
    assert mirror.state_hash == versions.states[number].state_hash
    assert mirror.planes is not None
    for dtype, plane in versions.states[number].planes.items():
        np.testing.assert_array_equal(mirror.planes.planes[dtype], plane)
    mirror.check_integrity()
