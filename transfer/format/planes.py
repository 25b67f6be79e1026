"""All weights of one version in host memory, as raw bits.

Owns one vector per dtype, cut by the layout, with a state hash per bucket. The trainer's kept copy and the
engine's mirror are both of this type. The hashes always belong to the bits; check_integrity() recomputes
them. Never reads a value as a number, never talks to a relay.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rose.transfer.format.codec import Bits, Elements, NewBits, Patch, SparsePatch, follow
from rose.transfer.format.layout import DTYPE_BYTES, Bucket, Layout, TensorPart
from rose.transfer.format.state_hash import StateHash

_BITS_BY_WIDTH: dict[int, np.dtype[np.unsignedinteger[Any]]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
}


def bits_dtype(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns the numpy type for the raw bits of a safetensors dtype."""
    return _BITS_BY_WIDTH[DTYPE_BYTES[dtype]]


class WeightPlanes:
    """The bits of every tensor of a layout, or of the buckets that a rank holds; zero until they are written.

    Memory that is never written is never allocated.
    """

    def __init__(
        self, layout: Layout, held: frozenset[int] | None = None, planes: dict[str, Bits] | None = None
    ) -> None:
        self.layout = layout
        self.held = held if held is not None else frozenset(range(len(layout.buckets)))
        """The indices of the buckets that are kept up to date."""
        self.planes: dict[str, Bits] = (
            planes
            if planes is not None
            else {dtype: np.zeros(count, bits_dtype(dtype)) for dtype, count in layout.plane_elements.items()}
        )
        self._bucket_hashes = [StateHash()] * len(layout.buckets)

    @property
    def state_hash(self) -> StateHash:
        """The hash of what is held; the hash of the whole state when all buckets are."""
        return sum(self._bucket_hashes, StateHash())

    def bucket_hash(self, bucket: Bucket) -> StateHash:
        return self._bucket_hashes[bucket.index]

    def bits(self, bucket: Bucket) -> Bits:
        """Returns the bucket's elements, in place. Only fill(), follow() and the two patch functions may
        write: they update the hash.
        """
        return self.planes[bucket.dtype][bucket.begin : bucket.end]

    def held_parts(self) -> set[TensorPart]:
        """Returns the parts of tensors of which something is held."""
        return {piece.part for index in self.held for piece in self.layout.pieces(self.layout.buckets[index])}

    def read_into(self, tensors: Mapping[str, Any]) -> None:
        """Copies every part of which something is held into arrays that have the tensors' shapes and raw
        bits.
        """
        for part in self.held_parts():
            self.read_part_into(part, tensors[part.tensor.name])

    def read_part_into(self, part: TensorPart, tensor: Any) -> None:
        """Copies a part into its place in an array that has its tensor's shape and raw bits."""
        target = part.of(tensor)
        source = self.planes[part.tensor.dtype][part.offset : part.offset + part.num_elements]
        target[...] = source.reshape(target.shape)

    def fill(self, bucket: Bucket, bits: Bits) -> None:
        """Replaces a whole bucket."""
        self.bits(bucket)[:] = bits
        self._bucket_hashes[bucket.index] = StateHash.of(bits, bucket.first_index)

    def follow(self, bucket: Bucket, new: NewBits) -> tuple[SparsePatch, StateHash]:
        """Sets the bucket to `new`, in one pass; returns what that changed, and the change of the bucket's
        hash.
        """
        patch, change = follow(self.bits(bucket), new, bucket.first_index)
        self._bucket_hashes[bucket.index] += change
        return patch, change

    def patch(self, bucket: Bucket, patch: Patch) -> None:
        """Applies a patch that was decoded against this bucket's present bits; can't fail."""
        self._bucket_hashes[bucket.index] += patch.apply_to(self.bits(bucket), bucket.first_index)

    def patch_noting(self, bucket: Bucket, patch: Patch) -> Elements:
        """Does what patch() does; returns what changed."""
        change, elements = patch.apply_noting(self.bits(bucket), bucket.first_index)
        self._bucket_hashes[bucket.index] += change
        return elements

    def revert(self, bucket: Bucket, patch: Patch, before: StateHash) -> None:
        """Undoes the bucket's last patch. before: the bucket's hash before that patch."""
        patch.revert(self.bits(bucket))
        self._bucket_hashes[bucket.index] = before

    def check_integrity(self) -> None:
        """Raises: AssertionError when a bucket's bits don't have the hash that is kept for them."""
        for bucket in (self.layout.buckets[index] for index in self.held):
            found = StateHash.of(self.bits(bucket), bucket.first_index)
            assert found == self._bucket_hashes[bucket.index], f"bucket {bucket.index}: {found}"
