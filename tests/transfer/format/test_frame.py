"""A frame is accepted whole and exact, or not at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import FrameError
from rose.transfer.format.codec import Codec
from rose.transfer.format.frame import HEADER_BYTES, Frame, run_digest
from rose.transfer.format.layout import Layout, TensorSpec
from rose.transfer.format.state_hash import StateHash

LAYOUT = Layout([TensorSpec(name="w", dtype="BF16", shape=(10, 3))])
FRAME = Frame(
    codec=Codec.G8S_ZSTD,
    width=2,
    bucket=0,
    run=run_digest("run"),
    base=3,
    version=4,
    layout=bytes.fromhex(LAYOUT.digest),
    dtype="BF16",
    num_elements=30,
    first_index=0,
    num_changed=7,
    base_hash=StateHash(1, 2),
    new_hash=StateHash(3, 2**64 - 1),
    payload=bytes(range(100)),
)


def test_a_frame_survives_the_wire() -> None:
    data = FRAME.pack()
    assert len(data) == HEADER_BYTES + 100
    assert Frame.unpack(data) == FRAME


def test_every_truncation_is_refused() -> None:
    data = FRAME.pack()
    for length in range(len(data)):
        with pytest.raises(FrameError):
            Frame.unpack(data[:length])


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_any_changed_bytes_are_refused(data: st.DataObject) -> None:
    packed = bytearray(FRAME.pack())
    places = data.draw(st.sets(st.integers(0, len(packed) - 1), min_size=1, max_size=4))
    for place in places:
        packed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        Frame.unpack(bytes(packed))


def test_every_single_flipped_bit_is_refused() -> None:
    packed = FRAME.pack()
    for bit in range(8 * len(packed)):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            Frame.unpack(bytes(flipped))


def test_extra_bytes_are_refused() -> None:
    with pytest.raises(FrameError, match="header says 100"):
        Frame.unpack(FRAME.pack() + b"\0")


def test_a_frame_for_another_place_is_refused() -> None:
    FRAME.check_place(LAYOUT.buckets[0], LAYOUT.digest)
    other = Layout([TensorSpec(name="v", dtype="BF16", shape=(10, 3))])
    with pytest.raises(FrameError, match="expected"):
        FRAME.check_place(other.buckets[0], other.digest)
