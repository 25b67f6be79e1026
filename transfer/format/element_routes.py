"""Where changed elements of a bucket lie in one rank's parameters.

Owns the way from a place in a bucket to a tensor's element and on to a parameter's, along the copies of a
shard plan. Pure: it computes indices and touches no weight.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rose.transfer.format.codec import Bits, Elements
from rose.transfer.format.layout import Bucket, Extent, Layout
from rose.transfer.format.shard_plan import ShardCopy, StridedView

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterChange:
    """Changed elements of one parameter: where they lie, their old and their new bits."""

    parameter: str
    places: NDArray[np.int32] | Index
    shift: int
    """An element's index among the flat ones of the parameter is its place plus this."""
    old: Bits
    new: Bits

    @property
    def num_changed(self) -> int:
        return self.places.size


class ElementRoutes:
    """The routes of one rank."""

    def __init__(self, copies: Iterable[ShardCopy]) -> None:
        """copies: those of a shard plan, none of them to one of whole_targets()."""
        self._copies: dict[str, list[tuple[ShardCopy, bool]]] = {}
        for copy in copies:
            in_order = is_contiguous(copy.source) and is_contiguous(copy.target)
            self._copies.setdefault(copy.source.name, []).append((copy, in_order))

    def changes(self, piece: Extent, elements: Elements) -> Iterator[ParameterChange]:
        """Yields what changes in the rank's parameters; nothing for elements that it does not hold.

        elements: those of the piece, by their places in the bucket.
        """
        for copy, in_order in self._copies.get(piece.tensor.name, ()):
            change = _change(piece, copy, in_order, elements)
            if change.num_changed > 0:
                yield change


def changed_pieces(layout: Layout, bucket: Bucket, elements: Elements) -> Iterator[tuple[Extent, Elements]]:
    """Yields the pieces of a bucket in which elements change, and those elements."""
    pieces = list(layout.pieces(bucket))
    begins = np.array([piece.at for piece in pieces], np.int32)
    found = np.searchsorted(elements.places, begins).tolist()
    for piece, begin, stop in zip(pieces, found, [*found[1:], elements.places.size], strict=True):
        if begin < stop:
            yield piece, _cut(elements, begin, stop)


def whole_targets(copies: Iterable[ShardCopy]) -> set[str]:
    """Returns the parameters to which no route leads: several of their elements have one source, or one
    element has several, of which only the loader keeps the last.
    """
    found: set[str] = set()
    ranges: list[tuple[str, int, int]] = []
    for copy in copies:
        steps = zip(copy.source.shape, copy.source.stride, strict=True)
        if any(size > 1 and stride <= 0 for size, stride in steps):
            found.add(copy.target.name)
        if is_contiguous(copy.target):
            ranges.append((copy.target.name, copy.target.offset, copy.target.num_elements))
    for (name, begin, size), (next_name, next_begin, _) in pairwise(sorted(ranges)):
        if name == next_name and next_begin < begin + size:
            found.add(name)
    return found


def _between(elements: Elements, first: int, end: int) -> Elements:
    """Returns the elements at these places, in place."""
    places = elements.places
    if places.size > 0 and first <= places[0] and places[-1] < end:
        return elements
    # Keys of another type would have all places converted.
    keys = np.clip((first, end), 0, np.iinfo(np.int32).max).astype(np.int32)
    return _cut(elements, *np.searchsorted(places, keys).tolist())


def _cut(elements: Elements, begin: int, stop: int) -> Elements:
    return Elements(
        places=elements.places[begin:stop], old=elements.old[begin:stop], new=elements.new[begin:stop]
    )


def _change(piece: Extent, copy: ShardCopy, in_order: bool, elements: Elements) -> ParameterChange:
    """Returns what the copy takes of a piece's elements to its parameter. in_order: the copy's both sides are
    contiguous.
    """
    source, target, shift = copy.source, copy.target, _shift(piece)
    if shift is not None and in_order:
        begin = source.offset - shift
        taken = _between(elements, begin, begin + source.num_elements)
        return ParameterChange(
            parameter=target.name,
            places=taken.places,
            shift=target.offset - begin,
            old=taken.old,
            new=taken.new,
        )
    in_view, is_taken = _index_in_view(source, _tensor_index(piece, elements.places))
    return ParameterChange(
        parameter=target.name,
        places=_index_of_target(target, in_view[is_taken]),
        shift=0,
        old=elements.old[is_taken],
        new=elements.new[is_taken],
    )


def _shift(piece: Extent) -> int | None:
    """Returns how far a place in the bucket is from the tensor's element; None where that varies."""
    part = piece.part
    if part.is_whole:
        return piece.begin - piece.at
    if math.prod(part.tensor.shape[: part.dim]) > 1:
        return None
    return piece.begin - piece.at + part.start * math.prod(part.tensor.shape[part.dim + 1 :])


def _tensor_index(piece: Extent, places: NDArray[np.int32]) -> Index:
    """Returns the elements' indices in the flat tensor; they rise as the places do."""
    shift, part = _shift(piece), piece.part
    if shift is not None:
        return places + np.int64(shift)
    inner = math.prod(part.tensor.shape[part.dim + 1 :])
    rows, whole_rows = part.stop - part.start, part.tensor.shape[part.dim]
    outer, rest = np.divmod(places + np.int64(piece.begin - piece.at), rows * inner)
    result: Index = outer * (whole_rows * inner) + rest + part.start * inner
    return result


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
    """Returns whether the view's elements follow each other in its order."""
    step = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
