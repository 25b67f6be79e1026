"""Makes shard plans by hand."""

import math

from rose.transfer.format.shard_plan import Box, ShardCopy, ShardPlan, StridedView


def plan_of(rank: str, shapes: dict[str, tuple[int, ...]], boxes: dict[str, Box]) -> ShardPlan:
    """Returns the plan of a rank that copies one box of each tensor in `boxes` to the place it came from."""
    views = [_view(name, box, shapes[name]) for name, box in boxes.items()]
    copies = [ShardCopy(source=view, target=view) for view in views]
    return ShardPlan(rank=rank, shapes=shapes, copies=copies, whole=[])


def _view(name: str, box: Box, shape: tuple[int, ...]) -> StridedView:
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    offset = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    sizes = tuple(stop - start for start, stop in zip(box.start, box.stop, strict=True))
    return StridedView(name=name, offset=offset, shape=sizes, stride=strides)
