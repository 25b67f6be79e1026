"""Which elements of the checkpoint a serving rank holds, and where each of them goes.

Owns one rank's plan as data, its regions of each tensor, and applying the plan to plain arrays. A plan is
exact: if a loader did more than strided copies, the plan names the tensor and holds all of it. Never looks at
a model: rose/engine/weights/shard_recorder.py makes plans from vLLM's own loaders. Source: ROSE §4.2
(shard-aware transfer). Where we differ: plans record what the loader does instead of inferring it from module
types and shapes, so merged, replicated, padded and fused tensors need no rules. An engine's ranks are on one
host and need all shards together, so shards are cut on the host, after the mirror, and not in the relay.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedView:
    """Elements of a flat tensor; offset and strides count elements."""

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def of(self, flat: Array) -> Array:
        """Returns this view of the tensor's elements, in place. Raises: ValueError when it leads outside
        them.
        """
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        if self.num_elements > 0 and not 0 <= self.offset <= last < flat.size:
            raise ValueError(f"{self} leads outside the tensor's {flat.size} elements")
        steps = [step * flat.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopy:
    """One copy that the loader makes, from the checkpoint's tensor to the rank's parameter."""

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
        """Returns whether the two boxes share an element."""
        starts = map(max, self.start, other.start)
        stops = map(min, self.stop, other.stop)
        return all(start < stop for start, stop in zip(starts, stops, strict=True))

    def lies_in(self, other: "Box") -> bool:
        """Returns whether all of this box is inside the other."""
        starts = zip(self.start, other.start, strict=True)
        stops = zip(self.stop, other.stop, strict=True)
        return all(mine >= its for mine, its in starts) and all(mine <= its for mine, its in stops)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls(start=(0,) * len(shape), stop=tuple(shape))

    @classmethod
    def of(cls, ends: Sequence[tuple[int, int]]) -> "Box":
        """Returns the box with these (start, stop) along every dimension."""
        return cls(start=tuple(start for start, _ in ends), stop=tuple(stop for _, stop in ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """What one rank copies out of the checkpoint."""

    rank: str
    """The rank's name, such as "pp0-tp3"."""
    shapes: dict[str, tuple[int, ...]]
    """The shape of every tensor of the checkpoint."""
    copies: list[ShardCopy]
    whole: list[str]
    """Tensors that the loader does more with than copy: they are needed whole, and only the loader can load
    them.
    """

    def boxes(self) -> dict[str, list[Box]]:
        """Returns the regions that the rank holds, by tensor. Tensors of which it holds nothing are
        absent.
        """
        held: dict[str, list[Box]] = {name: [Box.whole(self.shapes[name])] for name in self.whole}
        for copy in self.copies:
            if copy.source.name not in self.whole:
                box = box_of(copy.source, self.shapes[copy.source.name])
                boxes = held.setdefault(copy.source.name, [])
                if box not in boxes:
                    boxes.append(box)
        return held

    def held_elements(self) -> int:
        """Returns the number of the checkpoint's elements that the rank needs."""
        return sum(box.num_elements for boxes in self.boxes().values() for box in boxes)

    def apply(self, tensors: Mapping[str, Array], parameters: Mapping[str, Array]) -> None:
        """Copies from flat checkpoint tensors into flat parameters. Raises: ValueError."""
        if self.whole:
            raise ValueError(f"{self.rank}: only the loader can load {', '.join(self.whole)}")
        for copy in self.copies:
            target = copy.target.of(parameters[copy.target.name])
            target[...] = copy.source.of(tensors[copy.source.name]).reshape(target.shape)


def box_of(view: StridedView, shape: Sequence[int]) -> Box:
    """Returns the region of a contiguous tensor that a view covers; the whole tensor where the view is no
    box.
    """
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
