"""Where every tensor's elements lie: one global index, and the cut into buckets.

Owns: the order of tensors (by dtype, then name), their offsets, the bucket plan, the layout digest.
Promises: a pure function of names, dtypes and shapes, so trainer and engines derive the same plan.
Never touches weights. Source: ROSE §4.2 (64 MB buckets).
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BUCKET_BYTES = 64 << 20

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
"""Width of an element by its safetensors dtype name; others can't be published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor's name in the Hugging Face checkpoint, its safetensors dtype and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {self.name}: dtype {self.dtype} is none of {', '.join(DTYPE_BYTES)}")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A run of consecutive elements of one dtype; `begin` counts inside that dtype's plane."""

    index: int
    dtype: str
    begin: int
    num_elements: int
    first_index: int
    """Global index of its first element, over all dtypes."""

    @property
    def end(self) -> int:
        return self.begin + self.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [begin, end) of a flattened tensor; they lie at `at` of their bucket."""

    tensor: TensorSpec
    begin: int
    end: int
    at: int


class Layout:
    """Tensors in order, grouped into one contiguous plane per dtype, cut into buckets.

    global index  0 ........... n0 | n0 .................. n0+n1
    planes        BF16: a | b | c  | F32: d | e
    buckets       [0  ][1   ][2 ]    [3      ]
    """

    def __init__(self, tensors: Iterable[TensorSpec], bucket_bytes: int = BUCKET_BYTES) -> None:
        self.tensors = tuple(sorted(tensors, key=lambda tensor: (tensor.dtype, tensor.name)))
        self.bucket_bytes = bucket_bytes
        if bucket_bytes < 4:
            raise ValueError(f"bucket_bytes must hold an element, got {bucket_bytes}")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"tensor names used twice: {', '.join(twice)}")
        self.offsets: dict[str, int] = {}
        self.plane_elements: dict[str, int] = {}
        for tensor in self.tensors:
            self.offsets[tensor.name] = self.plane_elements.get(tensor.dtype, 0)
            self.plane_elements[tensor.dtype] = self.offsets[tensor.name] + tensor.num_elements
        self.buckets = tuple(self._cut())

    def _cut(self) -> Iterable[Bucket]:
        index = 0
        first_index = 0
        for dtype, total in self.plane_elements.items():
            step = self.bucket_bytes // DTYPE_BYTES[dtype]
            for begin in range(0, total, step):
                count = min(step, total - begin)
                yield Bucket(
                    index=index,
                    dtype=dtype,
                    begin=begin,
                    num_elements=count,
                    first_index=first_index + begin,
                )
                index += 1
            first_index += total

    def pieces(self, bucket: Bucket) -> Iterator[Piece]:
        """The parts of tensors that fill a bucket, in order, without gaps."""
        for tensor in self.tensors:
            offset = self.offsets[tensor.name]
            begin = max(offset, bucket.begin)
            end = min(offset + tensor.num_elements, bucket.end)
            if tensor.dtype == bucket.dtype and begin < end:
                yield Piece(tensor=tensor, begin=begin - offset, end=end - offset, at=begin - bucket.begin)

    @property
    def num_elements(self) -> int:
        return sum(self.plane_elements.values())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def digest(self) -> str:
        """16 hex digits over names, dtypes, shapes and the bucket size."""
        table = [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in self.tensors]
        text = json.dumps([self.bucket_bytes, table], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
