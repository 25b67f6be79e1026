"""Frames: one bucket on the wire, with checksums over every byte.

Wire format, all little-endian: a header of 168 bytes, then the payload.

    offset  size  field
    0       8     magic "ROSEWGHT"
    8       2     format version, 2
    10      1     codec (rose.transfer.format.codec.Codec)
    11      1     element width in bytes
    12      4     bucket index in the layout
    16      16    run: xxh3-128 of the run id
    32      8     base version, -1 = none (a snapshot)
    40      8     new version
    48      8     layout digest (names, dtypes, shapes, bucket size)
    56      8     dtype name, ASCII, padded with zeros
    64      8     elements in the bucket
    72      8     global index of its first element
    80      8     changed elements
    88      8     payload bytes
    96      16    payload: xxh3-128
    112     16    state hash of the bucket before
    128     16    state hash of the bucket after
    144     8     reserved, zero
    152     16    xxh3-128 of bytes 0..152

Owns that format. Any truncated, extended or flipped byte raises FrameError in unpack(), before anybody looks
at the payload. Never decodes the payload (codec.py does) and never knows keys (manifest.py does).
"""

import struct
from dataclasses import dataclass
from typing import Any, Self

import xxhash

from rose.errors import FrameError
from rose.transfer.format.codec import Codec
from rose.transfer.format.layout import DTYPE_BYTES, Bucket, Layout
from rose.transfer.format.state_hash import StateHash
from rose.types import BytesLike

MAGIC = b"ROSEWGHT"
FORMAT = 2
NO_BASE = -1
_FIELDS = struct.Struct("<8sHBBI16sqq8s8sQQQQ16s16s16s8x")
_CHECK_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECK_BYTES
assert HEADER_BYTES == 168


def run_digest(run_id: str) -> bytes:
    """Returns the 16 bytes by which a frame names its run."""
    return xxhash.xxh3_128_digest(run_id.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One bucket of one version."""

    codec: Codec
    width: int
    bucket: int
    run: bytes
    base: int
    version: int
    layout: bytes
    dtype: str
    num_elements: int
    first_index: int
    num_changed: int
    base_hash: StateHash
    new_hash: StateHash
    payload: BytesLike

    @classmethod
    def of(
        cls,
        layout: Layout,
        bucket: Bucket,
        run_id: str,
        base: int | None,
        version: int,
        *,
        codec: Codec,
        payload: BytesLike,
        num_changed: int,
        before: StateHash,
        after: StateHash,
    ) -> Self:
        """Returns the frame of a bucket's payload. base: None for a snapshot."""
        return cls(
            codec=codec,
            width=DTYPE_BYTES[bucket.dtype],
            bucket=bucket.index,
            run=run_digest(run_id),
            base=base if base is not None else NO_BASE,
            version=version,
            layout=bytes.fromhex(layout.digest),
            dtype=bucket.dtype,
            num_elements=bucket.num_elements,
            first_index=bucket.first_index,
            num_changed=num_changed,
            base_hash=before,
            new_hash=after,
            payload=payload,
        )

    def pack(self) -> bytes:
        """Returns the frame as bytes."""
        fields = _FIELDS.pack(
            MAGIC,
            FORMAT,
            self.codec,
            self.width,
            self.bucket,
            self.run,
            self.base,
            self.version,
            self.layout,
            self.dtype.encode(),
            self.num_elements,
            self.first_index,
            self.num_changed,
            len(self.payload),
            xxhash.xxh3_128_digest(self.payload),
            self.base_hash.to_bytes(),
            self.new_hash.to_bytes(),
        )
        return fields + xxhash.xxh3_128_digest(fields) + self.payload

    @classmethod
    def unpack(cls, data: BytesLike) -> Self:
        """Returns the frame in `data`, where its payload stays. Raises: FrameError on anything but the exact
        bytes that pack() made.
        """
        data = memoryview(data)
        if len(data) < HEADER_BYTES:
            raise FrameError(f"frame of {len(data)} bytes is shorter than its header ({HEADER_BYTES})")
        fields = data[: _FIELDS.size]
        if xxhash.xxh3_128_digest(fields) != data[_FIELDS.size : HEADER_BYTES]:
            raise FrameError("frame header does not match its checksum")
        return cls._from_fields(_FIELDS.unpack(fields), data[HEADER_BYTES:])

    @classmethod
    def _from_fields(cls, fields: tuple[Any, ...], payload: memoryview) -> Self:
        (magic, version_of_format, codec, width, bucket, run, base, version, layout) = fields[:9]
        (dtype, num_elements, first_index, num_changed, size, check, base_hash, new_hash) = fields[9:]
        if magic != MAGIC or version_of_format != FORMAT:
            raise FrameError(f"not a weight frame of format {FORMAT}: {magic!r} {version_of_format!r}")
        if size != len(payload):
            raise FrameError(f"frame holds {len(payload)} payload bytes, its header says {size}")
        if xxhash.xxh3_128_digest(payload) != check:
            raise FrameError("frame payload does not match its checksum")
        if codec not in set(Codec):
            raise FrameError(f"frame uses unknown codec {codec!r}")
        return cls(
            codec=Codec(codec),
            width=width,
            bucket=bucket,
            run=run,
            base=base,
            version=version,
            layout=layout,
            dtype=dtype.rstrip(b"\0").decode("ascii", "replace"),
            num_elements=num_elements,
            first_index=first_index,
            num_changed=num_changed,
            base_hash=StateHash.from_bytes(base_hash),
            new_hash=StateHash.from_bytes(new_hash),
            payload=payload,
        )

    def check_place(self, bucket: Bucket, layout_digest: str) -> None:
        """Raises: FrameError unless the frame is for this bucket of this layout."""
        expected = (bucket.index, bucket.dtype, bucket.num_elements, bucket.first_index, layout_digest)
        found = (self.bucket, self.dtype, self.num_elements, self.first_index, self.layout.hex())
        if found != expected:
            raise FrameError(f"frame is for {found}, expected {expected}")

    def check_version(self, run_id: str, base: int | None, version: int) -> None:
        """Raises: FrameError unless the frame leads from `base`, None for a snapshot, to this version of the
        run.
        """
        expected = (run_digest(run_id), base if base is not None else NO_BASE, version)
        if (self.run, self.base, self.version) != expected:
            raise FrameError(
                f"frame is {self.version} on {self.base} of run {self.run.hex()}, expected "
                f"{version} on {expected[1]} of {expected[0].hex()}"
            )
