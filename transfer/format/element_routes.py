"""Where changed elements of a bucket lie in one rank's parameters.

Owns the way from a place in a bucket to a tensor's element and on to a parameter's, along the copies of a
shard plan. Pure: it computes indices and touches no weight.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rose.errors import FrameError
from rose.transfer.format.codec import Bits, Elements
from rose.transfer.format.layout import Bucket, Layout, Part, Piece
from rose.transfer.format.shard_plan import ShardCopy, ShardPlan, StridedView

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterChange:
    """Changed elements of one parameter: indices into its flat elements, their old and their new bits."""

    parameter: str
    index: Index
    old: Bits
    new: Bits


class ElementRoutes:
    """The routes of one rank."""

    def __init__(self, layout: Layout, plan: ShardPlan) -> None:
        """Raises: FrameError where the plan has more than copies, each element to one place."""
        if plan.whole:
            raise FrameError(f"only the loader can load {', '.join(plan.whole)}")
        self._layout = layout
        self._copies: dict[str, list[ShardCopy]] = {}
        for copy in plan.copies:
            steps = zip(copy.source.shape, copy.source.stride, strict=True)
            if any(size > 1 and stride <= 0 for size, stride in steps):
                raise FrameError(f"{copy.source.name} is copied to several places of {copy.target.name}")
            self._copies.setdefault(copy.source.name, []).append(copy)

    def changes(self, bucket: Bucket, elements: Elements) -> Iterator[ParameterChange]:
        """Yields what changes in the rank's parameters; nothing for elements that it does not hold."""
        for piece in self._layout.pieces(bucket):
            copies = self._copies.get(piece.tensor.name)
            if not copies:
                continue
            size = piece.end - piece.begin
            first, last = np.searchsorted(elements.places, (piece.at, piece.at + size))
            if first == last:
                continue
            of_tensor = _tensor_index(piece, elements.places[first:last])
            old, new = elements.old[first:last], elements.new[first:last]
            for copy in copies:
                change = _change(copy, of_tensor, old, new)
                if change is not None:
                    yield change


def _tensor_index(piece: Piece, places: NDArray[np.int32]) -> Index:
    """Returns the elements' indices in the flat tensor; they rise as the places do."""
    index = places + np.int64(piece.begin - piece.at)
    part: Part = piece.part
    if part.is_whole:
        return index
    inner = math.prod(part.tensor.shape[part.dim + 1 :])
    rows, whole_rows = part.stop - part.start, part.tensor.shape[part.dim]
    outer, rest = np.divmod(index, rows * inner)
    result: Index = outer * (whole_rows * inner) + rest + part.start * inner
    return result


def _change(copy: ShardCopy, of_tensor: Index, old: Bits, new: Bits) -> ParameterChange | None:
    """Returns what the copy takes of these elements to its parameter; None if it takes nothing."""
    source, target = copy.source, copy.target
    if is_contiguous(source):
        first, last = np.searchsorted(of_tensor, (source.offset, source.offset + source.num_elements))
        index, old, new = of_tensor[first:last] - source.offset, old[first:last], new[first:last]
    else:
        in_view, taken = _index_in_view(source, of_tensor)
        index, old, new = in_view[taken], old[taken], new[taken]
    if index.size == 0:
        return None
    return ParameterChange(parameter=target.name, index=_index_of_target(target, index), old=old, new=new)


def _index_in_view(view: StridedView, of_tensor: Index) -> tuple[Index, NDArray[np.bool_]]:
    """Returns the elements' numbers in the view's own order, and which of them lie in the view."""
    rest = of_tensor - view.offset
    in_view, taken = np.zeros_like(rest), rest >= 0
    dims = [dim for dim, size in enumerate(view.shape) if size > 1]
    for dim in sorted(dims, key=lambda each: -view.stride[each]):
        at, rest = np.divmod(rest, view.stride[dim])
        taken &= at < view.shape[dim]
        in_view += at * math.prod(view.shape[dim + 1 :])
    return in_view, taken & (rest == 0)


def _index_of_target(view: StridedView, in_view: Index) -> Index:
    if is_contiguous(view):
        return in_view + view.offset
    index = np.full_like(in_view, view.offset)
    for dim, size in enumerate(view.shape):
        index += in_view // math.prod(view.shape[dim + 1 :]) % size * view.stride[dim]
    return index


def is_contiguous(view: StridedView) -> bool:
    """Whether the view's elements follow each other in its order."""
    step = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
