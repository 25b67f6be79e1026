"""Cuts a layout at the edges of the trainer ranks' shards, so that every rank publishes just its share.

Owns the cuts, after which every rank holds each part wholly or not at all; the groups of parts that the same
ranks hold; and which rank publishes which bucket. Pure. Source: ROSE §4.2. Where we differ: parts are grouped
by the ranks that hold them, so pipeline stages, replicated heads, padding and mixed parallelism all give
whole buckets, without a rule for each.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from rose.transfer.format.layout import DTYPE_BYTES, Layout, TensorCut, TensorPart, TensorSpec
from rose.transfer.format.shard_plan import Box

Holdings = dict[str, list[Box]]
"""The regions of each tensor that one rank holds."""


def cut_by_holdings(tensors: Iterable[TensorSpec], ranks: Sequence[Holdings]) -> dict[str, TensorCut]:
    """Returns one cut per tensor. ranks: the holdings of all ranks that publish."""
    signatures: dict[tuple[int, ...], int] = {}
    cuts: dict[str, TensorCut] = {}
    for tensor in sorted(tensors, key=lambda each: (each.dtype, each.name)):
        dim, points = _edges(tensor, [box for rank in ranks for box in rank.get(tensor.name, [])])
        groups: list[int] = []
        ends = (0, *points, tensor.shape[dim] if tensor.shape else 0)
        for start, stop in pairwise(ends):
            part = _box(tensor, dim, start, stop)
            holders = tuple(
                number
                for number, rank in enumerate(ranks)
                if any(part.meets(box) for box in rank.get(tensor.name, []))
            )
            groups.append(signatures.setdefault(holders, len(signatures)))
        cuts[tensor.name] = TensorCut(dim=dim, points=points, groups=tuple(groups))
    return cuts


def assign_buckets(layout: Layout, ranks: Sequence[Holdings]) -> list[frozenset[int]]:
    """Assigns each bucket to one rank that holds all of it, with the bytes spread as evenly as possible.

    Raises: ValueError when no rank holds a whole bucket.
    """
    holders: dict[TensorPart, list[int]] = {
        part: [
            number
            for number, rank in enumerate(ranks)
            if any(Box.of(part.box).lies_in(box) for box in rank.get(part.tensor.name, []))
        ]
        for part in layout.parts
    }
    shares: list[set[int]] = [set() for _ in ranks]
    loads = [0] * len(ranks)
    for bucket in sorted(layout.buckets, key=lambda each: (-each.num_elements, each.index)):
        pieces = list(layout.pieces(bucket))
        able = set.intersection(*(set(holders[piece.part]) for piece in pieces))
        if not able:
            names = ", ".join(sorted({piece.tensor.name for piece in pieces}))
            raise ValueError(f"no trainer rank holds all of bucket {bucket.index}: {names}")
        chosen = min(able, key=lambda number: (loads[number], number))
        shares[chosen].add(bucket.index)
        loads[chosen] += bucket.num_elements * DTYPE_BYTES[bucket.dtype]
    return [frozenset(share) for share in shares]


def _edges(tensor: TensorSpec, boxes: Sequence[Box]) -> tuple[int, tuple[int, ...]]:
    """Returns the dimension with the most cuts, and the cuts."""
    best: tuple[int, tuple[int, ...]] = (0, ())
    for dim, size in enumerate(tensor.shape):
        edges = {edge for box in boxes for edge in (box.start[dim], box.stop[dim])} - {0, size}
        if len(edges) > len(best[1]):
            best = (dim, tuple(sorted(edges)))
    return best


def _box(tensor: TensorSpec, dim: int, start: int, stop: int) -> Box:
    if not tensor.shape:
        return Box(start=(), stop=())
    ends = [(0, size) for size in tensor.shape]
    ends[dim] = (start, stop)
    return Box.of(ends)
