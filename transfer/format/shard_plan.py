"""Which elements of the checkpoint a serving rank holds, and where each of them goes.

Owns: the plan of one rank as data, its regions of each tensor, applying it to plain arrays.
Promises: exact; what a loader did that can't be told as strided copies makes the whole tensor held, and is
named.
Never looks at a model: shard_recorder.py makes plans from vLLM's own loaders. Source: ROSE §4.2
(shard-aware transfer). Where we differ: recorded from what the loader does instead of inferred from module
types and shapes, so merged, replicated, padded and fused tensors need no rules.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

Array = NDArray[Any]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StridedView(_Body):
    """Elements of a flat tensor; offset and strides count elements."""

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def of(self, flat: Array) -> Array:
        """This view of the tensor's elements, in place. Raises: ValueError when it leads out of them."""
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        if self.num_elements > 0 and not 0 <= self.offset <= last < flat.size:
            raise ValueError(f"{self} leads out of {flat.size} elements")
        steps = [step * flat.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, steps)


class ShardCopy(_Body):
    """One copy of the loader: from the checkpoint's tensor to the rank's parameter."""

    source: StridedView
    target: StridedView


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Elements [start, stop) along every dimension of a tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    def meets(self, other: "Box") -> bool:
        """Whether they share an element."""
        starts = map(max, self.start, other.start)
        stops = map(min, self.stop, other.stop)
        return all(start < stop for start, stop in zip(starts, stops, strict=True))

    def lies_in(self, other: "Box") -> bool:
        """Whether all of it is in the other one."""
        starts = zip(self.start, other.start, strict=True)
        stops = zip(self.stop, other.stop, strict=True)
        return all(mine >= its for mine, its in starts) and all(mine <= its for mine, its in stops)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls(start=(0,) * len(shape), stop=tuple(shape))

    @classmethod
    def of(cls, ends: Sequence[tuple[int, int]]) -> "Box":
        """From (start, stop) along every dimension."""
        return cls(start=tuple(start for start, _ in ends), stop=tuple(stop for _, stop in ends))


class ShardPlan(_Body):
    """What one rank copies out of the checkpoint."""

    rank: str
    """E.g. "pp0-tp3"."""
    shapes: dict[str, tuple[int, ...]]
    """Of every tensor of the checkpoint."""
    copies: list[ShardCopy]
    whole: list[str]
    """Tensors that the loader did more with than copy: they are needed whole, and only it can load them."""

    def boxes(self) -> dict[str, list[Box]]:
        """The regions that the rank holds, by tensor; tensors it holds nothing of are absent."""
        held: dict[str, list[Box]] = {name: [Box.whole(self.shapes[name])] for name in self.whole}
        for copy in self.copies:
            if copy.source.name not in self.whole:
                box = box_of(copy.source, self.shapes[copy.source.name])
                boxes = held.setdefault(copy.source.name, [])
                if box not in boxes:
                    boxes.append(box)
        return held

    def held_elements(self) -> int:
        """How many elements the rank needs of the whole checkpoint."""
        return sum(box.num_elements for boxes in self.boxes().values() for box in boxes)

    def apply(self, tensors: Mapping[str, Array], parameters: Mapping[str, Array]) -> None:
        """Copies from flat checkpoint tensors into flat parameters. Raises: ValueError."""
        if self.whole:
            raise ValueError(f"{self.rank}: only the loader can load {', '.join(self.whole)}")
        for copy in self.copies:
            target = copy.target.of(parameters[copy.target.name])
            target[...] = copy.source.of(tensors[copy.source.name]).reshape(target.shape)


def read_plan(path: Path) -> ShardPlan:
    """The plan in a file. Raises: ValueError naming the file."""
    try:
        return ShardPlan.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ValueError(f"--plan {path}: {error}") from error


def box_of(view: StridedView, shape: Sequence[int]) -> Box:
    """The region of a contiguous tensor that a view covers; the whole tensor when it is no box."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    by_stride = {stride: dim for dim, stride in enumerate(strides) if shape[dim] > 1}
    sizes = [1] * len(shape)
    for size, stride in zip(view.shape, view.stride, strict=True):
        if size > 1:
            if stride not in by_stride:
                return Box.whole(shape)
            sizes[by_stride[stride]] = size
    start: list[int] = []
    rest = view.offset
    for stride in strides:
        at, rest = divmod(rest, stride) if stride > 0 else (0, rest)
        start.append(at)
    stop = [at + size for at, size in zip(start, sizes, strict=True)]
    if any(end > length for end, length in zip(stop, shape, strict=True)):
        return Box.whole(shape)
    return Box(start=tuple(start), stop=tuple(stop))
