"""Changed elements end up where the plan's copies would have put them."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from rose.transfer.format.codec import Elements
from rose.transfer.format.element_routes import ElementRoutes, changed_pieces, whole_targets
from rose.transfer.format.layout import Layout, TensorCut, TensorSpec
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.format.shard_plan import ShardCopy, ShardPlan, StridedView

Shape = tuple[int, ...]
SHAPES: dict[str, Shape] = {"a": (12, 10), "b": (4, 6, 5), "c": (7,), "d": (3, 8)}
SPECS = [TensorSpec(name=name, dtype="BF16", shape=shape) for name, shape in SHAPES.items()]
CUTS: dict[str | None, dict[str, TensorCut] | None] = {
    None: None,
    "rows": {"a": TensorCut(dim=0, points=(5,), groups=(0, 1))},
    "columns": {
        "a": TensorCut(dim=1, points=(3, 7), groups=(0, 1, 0)),
        "b": TensorCut(dim=1, points=(2,), groups=(1, 0)),
    },
}


def copy(
    source: str,
    offset: int,
    shape: Shape,
    stride: Shape,
    target: str,
    target_offset: int,
    target_stride: Shape | None = None,
    target_shape: Shape | None = None,
) -> ShardCopy:
    target_shape = target_shape if target_shape is not None else shape
    if target_stride is None:
        target_stride = tuple(math.prod(target_shape[dim + 1 :]) for dim in range(len(target_shape)))
    return ShardCopy(
        source=StridedView(name=source, offset=offset, shape=shape, stride=stride),
        target=StridedView(name=target, offset=target_offset, shape=target_shape, stride=target_stride),
    )


def plan(*copies: ShardCopy, whole: Sequence[str] = ()) -> ShardPlan:
    return ShardPlan(rank="pp0-tp0", shapes=SHAPES, copies=list(copies), whole=list(whole))


PLAN = plan(
    copy("a", 30, (6, 10), (10, 1), "fused", 20),  # rows
    copy("c", 0, (7,), (1,), "fused", 90),
    copy("c", 0, (7,), (1,), "fused", 100),  # a replica
    copy("a", 4, (12, 3), (10, 1), "columns", 0),
    copy("a", 0, (10, 12), (1, 10), "transposed", 5),
    copy("b", 30, (2, 3, 5), (30, 10, 1), "strided", 1, target_stride=(40, 11, 2)),
    copy("b", 0, (4, 30), (30, 1), "reshaped", 0, target_shape=(20, 6)),
)
SIZES = {"fused": 120, "columns": 36, "transposed": 125, "strided": 90, "reshaped": 120}


def filled(layout: Layout, tensors: Mapping[str, NDArray[np.uint16]]) -> WeightPlanes:
    planes = WeightPlanes(layout)
    for part in layout.parts:
        bits = part.of(tensors[part.tensor.name]).reshape(-1)
        planes.planes["BF16"][part.offset : part.offset + part.num_elements] = bits
    return planes


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("share", [0.05, 1.0])
def test_every_change_reaches_each_of_its_places_and_nothing_else_moves(
    cut: str | None, share: float
) -> None:
    rng = np.random.default_rng(0)
    layout = Layout(SPECS, bucket_bytes=34, cuts=CUTS[cut])
    old = {name: rng.integers(0, 65536, shape).astype(np.uint16) for name, shape in SHAPES.items()}
    new = {name: np.where(rng.random(each.shape) < share, each + 1, each) for name, each in old.items()}
    parameters = [{name: np.zeros(size, np.uint16) for name, size in SIZES.items()} for _ in range(2)]
    for each, tensors in zip(parameters, (old, new), strict=True):
        PLAN.apply({name: tensor.reshape(-1) for name, tensor in tensors.items()}, each)
    found, expected = parameters
    before, after = filled(layout, old), filled(layout, new)
    routes = ElementRoutes(PLAN.copies)
    for bucket in layout.buckets:
        was, now = before.bits(bucket), after.bits(bucket)
        places = np.flatnonzero(was != now).astype(np.int32)
        elements = Elements(places=places, old=was[places], new=now[places])
        for piece, mine in changed_pieces(layout, bucket, elements):
            for change in routes.changes(piece, mine):
                index = change.places + np.int64(change.shift)
                assert np.array_equal(found[change.parameter][index], change.old)
                found[change.parameter][index] = change.new
    for name, bits in expected.items():
        assert np.array_equal(found[name], bits), name


def test_parameters_of_copies_that_overlap_or_repeat_have_no_routes() -> None:
    bad = [
        copy("c", 0, (3, 7), (0, 1), "repeated", 0),
        copy("c", 0, (7,), (1,), "overlapping", 0),
        copy("d", 0, (3, 8), (8, 1), "overlapping", 6),
    ]
    assert whole_targets([*PLAN.copies, *bad]) == {"repeated", "overlapping"}


def test_pieces_in_which_elements_change_are_named() -> None:
    layout = Layout(SPECS, bucket_bytes=10**6)
    (bucket,) = layout.buckets
    places = np.array([3, 120 + 119, 120 + 120 + 7], np.int32)
    bits = np.zeros(3, np.uint16)
    changed = changed_pieces(layout, bucket, Elements(places=places, old=bits, new=bits))
    assert [(piece.tensor.name, mine.places.tolist()) for piece, mine in changed] == [
        ("a", [3]),
        ("b", [239]),
        ("d", [247]),
    ]
