"""The layout is a pure function of names, dtypes and shapes, and its buckets tile every plane."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import RelayError
from rose.transfer.format.layout import DTYPE_BYTES, Layout, TensorCut, TensorSpec
from rose.transfer.format.manifest import LayoutBody, check_name, worker_name

CutTable = tuple[list[TensorSpec], dict[str, TensorCut]]

tables = st.lists(
    st.builds(
        lambda number, dtype, shape: TensorSpec(name=f"t{number}", dtype=dtype, shape=tuple(shape)),
        st.integers(0, 10**6),
        st.sampled_from(["BF16", "F32", "F8_E4M3"]),
        st.lists(st.integers(0, 7), max_size=3),
    ),
    max_size=12,
    unique_by=lambda spec: spec.name,
)


@settings(deadline=None)
@given(tensors=tables, bucket_bytes=st.integers(4, 200))
def test_buckets_tile_every_plane_and_pieces_tile_every_bucket(
    tensors: list[TensorSpec], bucket_bytes: int
) -> None:
    layout = Layout(tensors, bucket_bytes)
    assert layout.num_elements == sum(spec.num_elements for spec in tensors)
    next_index = 0
    covered = {spec.name: 0 for spec in tensors}
    for bucket in layout.buckets:
        assert bucket.first_index == next_index
        assert 0 < bucket.num_elements * DTYPE_BYTES[bucket.dtype] <= bucket_bytes
        next_index += bucket.num_elements
        at = 0
        for piece in layout.pieces(bucket):
            assert (piece.at, piece.begin) == (at, covered[piece.tensor.name])
            at += piece.end - piece.begin
            covered[piece.tensor.name] = piece.end
        assert at == bucket.num_elements
    assert next_index == layout.num_elements
    assert covered == {spec.name: spec.num_elements for spec in tensors}


def test_a_long_group_begins_with_small_buckets() -> None:
    sizes = [bucket.num_elements for bucket in Layout(_one_tensor(2000), bucket_bytes=1600).buckets]
    assert sizes == [100, 400, 800, 700]
    assert [bucket.num_elements for bucket in Layout(_one_tensor(1600), 1600).buckets] == [800, 800]


def _one_tensor(num_elements: int) -> list[TensorSpec]:
    return [TensorSpec(name="a", dtype="BF16", shape=(num_elements,))]


@settings(deadline=None)
@given(tensors=tables)
def test_the_order_of_tensors_does_not_matter(tensors: list[TensorSpec]) -> None:
    assert Layout(tensors).digest == Layout(list(reversed(tensors))).digest
    assert LayoutBody.of(Layout(tensors)).to_layout().buckets == Layout(tensors).buckets


@st.composite
def cut_tables(draw: st.DrawFn) -> CutTable:
    """Draws tensors, with cuts for some of them."""
    tensors = draw(tables)
    cuts: dict[str, TensorCut] = {}
    for spec in tensors:
        dims = [dim for dim, size in enumerate(spec.shape) if size > 1 and spec.num_elements > 0]
        if draw(st.booleans()) and dims:
            dim = draw(st.sampled_from(dims))
            points = tuple(sorted(draw(st.sets(st.integers(1, spec.shape[dim] - 1), max_size=3))))
            groups = tuple(draw(st.integers(0, 3)) for _ in range(len(points) + 1))
            cuts[spec.name] = TensorCut(dim=dim, points=points, groups=groups)
    return tensors, cuts


@settings(deadline=None)
@given(table=cut_tables(), bucket_bytes=st.integers(4, 200))
def test_every_element_of_a_cut_tensor_lies_in_one_bucket_of_its_group(
    table: CutTable, bucket_bytes: int
) -> None:
    tensors, cuts = table
    layout = Layout(tensors, bucket_bytes, cuts)
    assert LayoutBody.of(layout).to_layout().buckets == layout.buckets
    seen = {spec.name: np.zeros(spec.shape, int) for spec in tensors}
    for bucket in layout.buckets:
        pieces = list(layout.pieces(bucket))
        assert len({piece.part.group for piece in pieces}) == 1
        assert sum(piece.end - piece.begin for piece in pieces) == bucket.num_elements
        for piece in pieces:
            region = piece.part.of(seen[piece.tensor.name])
            counts = region.reshape(-1).copy()
            counts[piece.begin : piece.end] += 1
            region[...] = counts.reshape(region.shape)
    assert all((count == 1).all() for count in seen.values())


def test_a_cut_that_does_not_fit_is_refused() -> None:
    spec = TensorSpec(name="a", dtype="BF16", shape=(4, 6))
    for cut in (
        TensorCut(dim=0, points=(4,), groups=(0, 1)),
        TensorCut(dim=1, points=(3, 2), groups=(0, 1, 2)),
        TensorCut(dim=2, points=(1,), groups=(0, 1)),
        TensorCut(dim=0, points=(2,), groups=(0,)),
    ):
        with pytest.raises(ValueError, match="does not fit tensor a"):
            Layout([spec], cuts={"a": cut})


def test_a_layout_body_with_a_changed_table_is_refused() -> None:
    body = LayoutBody.of(Layout([TensorSpec(name="a", dtype="BF16", shape=(3,))]))
    with pytest.raises(RelayError, match="digest"):
        body.model_copy(update={"bucket_bytes": 128}).to_layout()


def test_bad_tensors_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="C64"):
        TensorSpec(name="a", dtype="C64", shape=(1,))
    with pytest.raises(ValueError, match="tensor a: dtype I64 can't be published"):
        Layout([TensorSpec(name="a", dtype="I64", shape=(1,))])
    spec = TensorSpec(name="a", dtype="BF16", shape=(1,))
    with pytest.raises(ValueError, match="twice: a"):
        Layout([spec, spec])
    with pytest.raises(ValueError, match="run id"):
        check_name("a/b", "run id")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://127.0.0.1:8001/", "HERE-8001"),
        ("http://localhost:8001", "HERE-8001"),
        ("https://[::1]:8001", "HERE-8001"),
        ("http://GPU-7.example:8001", "GPU-7.example-8001"),
        ("http://10.0.0.5:8001/", "10.0.0.5-8001"),
        ("http://[fd00::5]:8001", "fd00--5--8001"),
    ],
)
def test_workers_of_two_hosts_never_acknowledge_under_one_name(url: str, name: str) -> None:
    """Engines of a fleet listen on 0.0.0.0, and each host's subscriber reaches its own at a loopback
    address."""
    assert worker_name(url) == name.replace("HERE", os.uname().nodename)
