"""The layout is a pure function of names, dtypes and shapes, and its buckets tile every plane."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import RelayError
from rose.transfer.layout import DTYPE_BYTES, Layout, TensorSpec
from rose.transfer.manifest import LayoutBody, check_name, worker_name

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
def test_buckets_tile_every_plane_and_pieces_tile_every_bucket(tensors, bucket_bytes):
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


@settings(deadline=None)
@given(tensors=tables)
def test_the_order_of_tensors_does_not_matter(tensors):
    assert Layout(tensors).digest == Layout(list(reversed(tensors))).digest
    assert LayoutBody.of(Layout(tensors)).to_layout().buckets == Layout(tensors).buckets


def test_a_layout_body_with_a_changed_table_is_refused():
    body = LayoutBody.of(Layout([TensorSpec(name="a", dtype="BF16", shape=(3,))]))
    with pytest.raises(RelayError, match="digest"):
        body.model_copy(update={"bucket_bytes": 128}).to_layout()


def test_bad_tensors_and_names_are_the_callers_mistake():
    with pytest.raises(ValueError, match="I64"):
        TensorSpec(name="a", dtype="I64", shape=(1,))
    spec = TensorSpec(name="a", dtype="BF16", shape=(1,))
    with pytest.raises(ValueError, match="twice: a"):
        Layout([spec, spec])
    with pytest.raises(ValueError, match="run id"):
        check_name("a/b", "run id")
    assert worker_name("http://127.0.0.1:8001/") == "127.0.0.1-8001"
