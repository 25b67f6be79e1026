"""Where every tensor's elements lie: one global index, cut into buckets.

Owns the order of tensors (by dtype, group, name), their offsets, the list of buckets, and the layout's
digest. A pure function of names, dtypes, shapes and cuts, so trainer and engines derive the same layout.
Never touches weights. Source: ROSE §4.2 (64 MB buckets).
"""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby, islice, pairwise, repeat
from typing import Any

BUCKET_BYTES = 64 << 20
_FIRST_SHARES = (8, 2)
"""A long group's first buckets are an eighth and a half of the usual size, so that sending starts when an
eighth is encoded. From then on each bucket is encoded while the one before it is sent.
"""
_CUT_RULE = 2
"""Part of the digest, so that two releases that cut differently never mistake each other's buckets for their
own.
"""

DTYPE_BYTES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "I16": 2,
    "U16": 2,
    "I32": 4,
    "U32": 4,
    "BOOL": 1,
}
"""The width of an element by its safetensors dtype name. Other dtypes can't be published."""
WIDE_BYTES = {"F64": 8, "I64": 8, "U64": 8}
"""The same of dtypes that a checkpoint may have and that can't be published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor's name in the Hugging Face checkpoint, its safetensors dtype and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        known = {**DTYPE_BYTES, **WIDE_BYTES}
        if self.dtype not in known:
            raise ValueError(f"tensor {self.name}: dtype {self.dtype} is none of {', '.join(known)}")

    @property
    def is_publishable(self) -> bool:
        return self.dtype in DTYPE_BYTES

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * {**DTYPE_BYTES, **WIDE_BYTES}[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive elements of one dtype; `begin` counts inside that dtype's plane."""

    index: int
    dtype: str
    begin: int
    num_elements: int
    first_index: int
    """The global index of its first element, over all dtypes."""

    @property
    def end(self) -> int:
        return self.begin + self.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCut:
    """How a tensor is cut along one dimension, and the group that each part belongs to.

    points: where each part but the first begins. groups: one number per part. Without points the tensor is
    one part.
    """

    dim: int
    points: tuple[int, ...]
    groups: tuple[int, ...]


UNCUT = TensorCut(dim=0, points=(), groups=(0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """Elements [start, stop) of a tensor along `dim`, row-major; `offset` counts in their dtype's plane."""

    tensor: TensorSpec
    dim: int
    start: int
    stop: int
    group: int
    offset: int

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and (not self.tensor.shape or self.stop == self.tensor.shape[self.dim])

    @property
    def num_elements(self) -> int:
        if self.is_whole:
            return self.tensor.num_elements
        return self.tensor.num_elements // self.tensor.shape[self.dim] * (self.stop - self.start)

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """The (start, stop) along every dimension."""
        whole = tuple((0, size) for size in self.tensor.shape)
        if self.is_whole:
            return whole
        return (*whole[: self.dim], (self.start, self.stop), *whole[self.dim + 1 :])

    def of(self, tensor: Any) -> Any:
        """Returns this part of the tensor, numpy's or torch's, in place."""
        return tensor if self.is_whole else tensor[tuple(slice(*ends) for ends in self.box)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Elements [begin, end) of a flattened part; they lie at offset `at` of their bucket."""

    part: TensorPart
    begin: int
    end: int
    at: int

    @property
    def tensor(self) -> TensorSpec:
        return self.part.tensor


class Layout:
    """Tensors in order, cut into parts, joined into one contiguous plane per dtype, and cut into buckets.

    global index  0 ........... n0 | n0 .................. n0+n1
    planes        BF16: a | b | c  | F32: d | e
    buckets       [0][1 ][2   ][3]   [4      ]

    cuts: by tensor name, for weights of which ranks hold shards. The parts of one group lie together and
    share no bucket with others, so a rank fetches whole groups. A tensor without a cut is one part, of group
    0.
    """

    def __init__(
        self,
        tensors: Iterable[TensorSpec],
        bucket_bytes: int = BUCKET_BYTES,
        cuts: Mapping[str, TensorCut] | None = None,
    ) -> None:
        self.tensors = tuple(sorted(tensors, key=lambda tensor: (tensor.dtype, tensor.name)))
        self.bucket_bytes = bucket_bytes
        self.cuts = dict(cuts) if cuts is not None else {}
        if bucket_bytes < 4:
            raise ValueError(f"bucket_bytes must hold an element, got {bucket_bytes}")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"tensor names used twice: {', '.join(twice)}")
        if wide := [tensor for tensor in self.tensors if not tensor.is_publishable]:
            raise ValueError(f"tensor {wide[0].name}: dtype {wide[0].dtype} can't be published")
        self.plane_elements: dict[str, int] = {}
        self.parts = tuple(self._place_parts())
        self._parts_by_dtype = {
            dtype: [part for part in self.parts if part.tensor.dtype == dtype]
            for dtype in self.plane_elements
        }
        self.buckets = tuple(self._cut())

    def _place_parts(self) -> Iterator[TensorPart]:
        bare = [part for tensor in self.tensors for part in _parts(tensor, self.cuts.get(tensor.name, UNCUT))]
        for part in sorted(bare, key=lambda part: (part.tensor.dtype, part.group)):
            dtype = part.tensor.dtype
            offset = self.plane_elements.get(dtype, 0)
            self.plane_elements[dtype] = offset + part.num_elements
            yield replace(part, offset=offset)

    def _cut(self) -> Iterable[Bucket]:
        index = 0
        first_index = 0
        for dtype, total in self.plane_elements.items():
            step = self.bucket_bytes // DTYPE_BYTES[dtype]
            for group_begin, group_end in self._group_ends(dtype):
                for begin, size in _cut_group(group_begin, group_end, step):
                    yield Bucket(
                        index=index,
                        dtype=dtype,
                        begin=begin,
                        num_elements=size,
                        first_index=first_index + begin,
                    )
                    index += 1
            first_index += total

    def _group_ends(self, dtype: str) -> Iterator[tuple[int, int]]:
        for _, parts in groupby(self._parts_by_dtype[dtype], key=lambda part: part.group):
            members = list(parts)
            yield members[0].offset, members[-1].offset + members[-1].num_elements

    @cached_property
    def parts_by_tensor(self) -> dict[str, list[TensorPart]]:
        """The parts of each tensor, in the order of their planes."""
        parts: dict[str, list[TensorPart]] = {}
        for part in self.parts:
            parts.setdefault(part.tensor.name, []).append(part)
        return parts

    def pieces(self, bucket: Bucket) -> Iterator[Extent]:
        """Yields the parts of tensors that fill a bucket, in order and without gaps."""
        parts = self._parts_by_dtype[bucket.dtype]
        first = bisect_right(parts, bucket.begin, key=lambda part: part.offset) - 1
        for part in islice(parts, max(first, 0), None):
            if part.offset >= bucket.end:
                return
            begin = max(part.offset, bucket.begin)
            end = min(part.offset + part.num_elements, bucket.end)
            if begin < end:
                at = begin - bucket.begin
                yield Extent(part=part, begin=begin - part.offset, end=end - part.offset, at=at)

    @property
    def num_elements(self) -> int:
        return sum(self.plane_elements.values())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @cached_property
    def digest(self) -> str:
        """16 hex digits over names, dtypes, shapes, cuts, and the rule by which buckets are cut."""
        table = [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in self.tensors]
        cuts = [[name, cut.dim, cut.points, cut.groups] for name, cut in sorted(self.cuts.items())]
        text = json.dumps([_CUT_RULE, self.bucket_bytes, table, *cuts], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _cut_group(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """Yields (begin, size) of the buckets of a group's elements: `step` each, except for the first ones and
    the last.
    """
    first = [step // share for share in _FIRST_SHARES] if end - begin > 2 * step else []
    for size in chain(filter(None, first), repeat(step)):
        if begin >= end:
            return
        yield begin, min(size, end - begin)
        begin += size


def _parts(tensor: TensorSpec, cut: TensorCut) -> Iterator[TensorPart]:
    """Yields a tensor's parts. Raises: ValueError on a cut that does not fit the tensor."""
    size = tensor.shape[cut.dim] if tensor.shape and cut.dim < len(tensor.shape) else 0
    ends = (0, *cut.points, size)
    is_rising = all(a < b for a, b in pairwise(ends)) or not cut.points
    if not is_rising or len(cut.groups) != len(cut.points) + 1:
        raise ValueError(f"{cut} does not fit tensor {tensor.name} of shape {tensor.shape}")
    for (start, stop), group in zip(pairwise(ends), cut.groups, strict=True):
        yield TensorPart(tensor=tensor, dim=cut.dim, start=start, stop=stop, group=group, offset=0)
