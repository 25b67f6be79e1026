"""Every codec is exact for every bit pattern, and refuses any payload that it can't have written."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from random_bits import WIDTHS, Width, changed_bits, random_bits

from rose import _delta
from rose.errors import FrameError
from rose.transfer.format.codec import Bits, Codec, Encoded, compare, decode, encode, follow, pack_followed
from rose.transfer.format.layout import DTYPE_BYTES
from rose.transfer.format.state_hash import StateHash
from rose.transfer.publish.codec_choice import choose_codec, pack_for_link

DENSITIES = [0.0, 1e-4, 0.002, 0.01, 0.2, 0.5, 0.9, 1.0]
SPARSE = [codec for codec in Codec if codec is not Codec.DENSE]
BF16_CORNERS = [
    0x0000,
    0x8000,
    0x7F80,
    0xFF80,
    0x7FC0,
    0xFFFF,
    0x7F81,
    0x0001,
    0x8001,
    0x3F80,
    0x7F7F,
    0xFF7F,
]


INSTRUCTIONS = ["portable", "neon", "avx2", "avx512"]


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with each set of instructions that the processor has."""
    if _delta.set_instructions(request.param) != request.param:
        pytest.skip(f"no {request.param} here")
    yield request.param
    _delta.set_instructions("avx512")


def check_exact(codec: Codec, old: Bits, new: Bits, first_index: int = 0) -> Encoded:
    encoded = encode(codec, old, new, first_index)
    base = old.copy()
    patch = decode(codec, encoded.payload, base)
    np.testing.assert_array_equal(base, old)
    change = patch.apply_to(base, first_index)
    np.testing.assert_array_equal(base, new)
    assert patch.num_changed == encoded.num_changed == int(np.count_nonzero(old != new))
    assert change == encoded.change
    assert StateHash.of(old, first_index) + change == StateHash.of(new, first_index)
    patch.revert(base)
    np.testing.assert_array_equal(base, old)
    noted, elements = decode(codec, encoded.payload, base).apply_noting(base, first_index)
    assert noted == change
    np.testing.assert_array_equal(base, new)
    places = np.flatnonzero(old != new)
    np.testing.assert_array_equal(elements.places, places)
    np.testing.assert_array_equal(elements.old, old[places])
    np.testing.assert_array_equal(elements.new, new[places])
    return encoded


def adam_like(
    rng: np.random.Generator, num_elements: int, density: float
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Returns bf16 bits before and after a step that moves most changed weights by one ULP."""
    weights = rng.standard_normal(num_elements, dtype=np.float32) * np.float32(0.02)
    old = (weights.view(np.uint32) >> 16).astype(np.uint16)
    ulps = rng.choice(np.array([1, -1, 2, -2, 5, -9]), num_elements, p=[0.435, 0.435, 0.05, 0.05, 0.02, 0.01])
    changed = rng.random(num_elements) < density
    return old, np.where(changed, old + ulps.astype(np.uint16), old)


@pytest.mark.parametrize("codec", list(Codec))
def test_every_pair_with_a_corner_value_survives(instructions: str, codec: Codec) -> None:
    every = np.arange(65536, dtype=np.uint16)
    for corner in BF16_CORNERS:
        check_exact(codec, np.full_like(every, corner), every)
        check_exact(codec, every, np.full_like(every, corner))


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", DENSITIES)
def test_random_bits_survive_at_every_density(
    instructions: str, codec: Codec, width: Width, density: float
) -> None:
    old, new = changed_bits(np.random.default_rng(7), width, 150_001, density)
    check_exact(codec, old, new, first_index=12_345)


@pytest.mark.parametrize("codec", [Codec.G8S, Codec.EXPONENT])
@pytest.mark.parametrize("density", DENSITIES)
def test_one_ulp_changes_survive_at_every_density(instructions: str, codec: Codec, density: float) -> None:
    old, new = adam_like(np.random.default_rng(3), 200_000, density)
    check_exact(codec, old, new)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    codec=st.sampled_from(list(Codec)),
    width=st.sampled_from(WIDTHS),
    size=st.integers(0, 300),
    first_index=st.integers(0, 2**40),
)
@pytest.mark.slow
def test_any_pair_of_vectors_survives(
    data: st.DataObject, codec: Codec, width: Width, size: int, first_index: int
) -> None:
    bits = st.lists(st.integers(0, np.iinfo(width).max), min_size=size, max_size=size)
    old = np.array(data.draw(bits), width)
    check_exact(codec, old, np.array(data.draw(bits), width), first_index)


@settings(max_examples=60, deadline=None)
@given(places=st.sets(st.integers(0, 200_000), max_size=40), codec=st.sampled_from(SPARSE))
def test_gaps_of_any_length_survive(places: set[int], codec: Codec) -> None:
    old = np.zeros(200_001, np.uint16)
    new = old.copy()
    new[list(places)] = 1
    check_exact(codec, old, new)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", DENSITIES)
def test_all_instructions_write_the_same_bytes(width: Width, density: float) -> None:
    rng = np.random.default_rng(13)
    old = random_bits(rng, width, 200_003)
    steps = rng.choice(np.array([1, -1, 2, -3, 200, -300]), old.size).astype(width)
    new = np.where(rng.random(old.size) < density, old + steps, old)
    written = set()
    try:
        for instructions in INSTRUCTIONS:
            used = _delta.set_instructions(instructions)
            assert INSTRUCTIONS.index(used) <= INSTRUCTIONS.index(instructions)
            encoded = [encode(codec, old, new, 77) for codec in SPARSE]
            written.add(tuple((each.payload, each.change) for each in encoded))
    finally:
        _delta.set_instructions("avx512")
    assert len(written) == 1
    with pytest.raises(ValueError, match="not sse"):
        _delta.set_instructions("sse")


@pytest.mark.parametrize("width", WIDTHS)
def test_new_bits_may_lie_in_pieces_of_any_length(instructions: str, width: Width) -> None:
    rng = np.random.default_rng(5)
    size = 150_000
    old, new = changed_bits(rng, width, size, 0.1)
    whole, change = compare(old, new, 7)
    for cuts in ([0, size], [1, 2, 65_535, 65_537, 131_000], sorted(rng.integers(0, size, 40))):
        # Copies put each piece elsewhere, at any address that its elements may have.
        pieces = [piece.copy() for piece in np.split(new, cuts)]
        pieced, same_change = compare(old, pieces, 7)
        assert same_change == change
        assert pieced.pack(Codec.G8S, old, "") == whole.pack(Codec.G8S, old, "")
        assert encode(Codec.DENSE, old, pieces, 7).payload == new.tobytes()
    with pytest.raises(ValueError, match=f"new has {size - 1}"):
        compare(old, [new[1:]], 0)


def test_g8s_with_zstd_takes_under_1_5_bytes_per_changed_element_at_one_percent() -> None:
    old, new = adam_like(np.random.default_rng(11), 4 << 20, 0.01)
    sizes = {codec: check_exact(codec, old, new) for codec in SPARSE}
    per_element = {codec: len(each.payload) / each.num_changed for codec, each in sizes.items()}
    assert per_element[Codec.COO] == 6
    assert per_element[Codec.G8S] < 1.6
    assert per_element[Codec.G8S_ZSTD] < 1.5


@pytest.mark.parametrize("codec", list(Codec))
def test_a_truncated_or_extended_payload_is_refused_and_writes_nothing(codec: Codec) -> None:
    rng = np.random.default_rng(5)
    old, new = adam_like(rng, 3000, 0.05)
    payload = encode(codec, old, new, 0).payload
    step = 1 if len(payload) < 2000 else 97
    base = old.copy()
    # COO can't notice that whole entries are missing; the frame's length and count notice it.
    lengths = [n for n in range(0, len(payload), step) if codec is not Codec.COO or n % 6]
    for length in lengths:
        with pytest.raises(FrameError):
            decode(codec, payload[:length], base)
    with pytest.raises(FrameError):
        decode(codec, payload + b"\0", base)
    np.testing.assert_array_equal(base, old)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), codec=st.sampled_from(SPARSE))
def test_a_flipped_payload_byte_never_writes_outside_or_half(data: st.DataObject, codec: Codec) -> None:
    old, new = adam_like(np.random.default_rng(9), 2000, 0.1)
    payload = bytearray(encode(codec, old, new, 0).payload)
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    guarded = np.full(old.size + 200, 0xABCD, np.uint16)
    base = guarded[100:-100]
    base[:] = old
    try:
        decode(codec, bytes(payload), base).apply_to(base, 0)
    except FrameError:
        np.testing.assert_array_equal(base, old)
    assert (guarded[:100] == 0xABCD).all() and (guarded[-100:] == 0xABCD).all()


@pytest.mark.parametrize("density", [0.001, 0.05, 1.0])
def test_a_stream_that_is_short_or_long_is_refused(instructions: str, density: float) -> None:
    rng = np.random.default_rng(1)
    old, new = adam_like(rng, 200_000, density)
    new[100_000:] = rng.integers(0, 65536, 100_000, dtype=np.uint16) if density == 1.0 else new[100_000:]
    delta, _ = _delta.Delta.between(old, [new], 0)
    forms: list[tuple[Sequence[bytes], Callable[[Sequence[bytes]], _delta.Delta]]] = [
        (delta.g8s(), lambda streams: _delta.Delta.from_g8s(streams, old.size, 2)),
        (delta.exponents(old, 7), lambda streams: _delta.Delta.from_exponents(streams, old)),
    ]
    for streams, read in forms:
        assert read(streams).num_changed == np.count_nonzero(old != new)
        for number, stream in enumerate(streams):
            for broken in (stream[:-1], stream + b"\0"):
                if broken != stream:
                    with pytest.raises(_delta.MalformedStream):
                        read([*streams[:number], broken, *streams[number + 1 :]])


def test_each_float_format_is_coded_by_its_own_exponent() -> None:
    rng = np.random.default_rng(4)
    for dtype, width in DTYPE_BYTES.items():
        bits = np.dtype(f"u{width}")
        old = rng.integers(0, 256**width, 5000).astype(bits)
        new = np.where(rng.random(old.size) < 0.05, old + bits.type(1), old)
        payload = encode(Codec.EXPONENT, old, new, 0, dtype).payload
        base = old.copy()
        decode(Codec.EXPONENT, payload, base).apply_to(base, 0)
        np.testing.assert_array_equal(base, new)


def test_arrays_that_are_not_raw_bits_are_refused() -> None:
    bits = np.zeros(8, np.uint16)
    with pytest.raises(ValueError, match="unsigned"):
        _delta.Delta.between(bits.view(np.float16), [bits], 0)
    with pytest.raises(ValueError, match="8 elements"):
        _delta.Delta.between(bits, [bits[:4].copy()], 0)
    with pytest.raises(ValueError, match="contiguous"):
        _delta.Delta.between(bits[::2], [bits[::2]], 0)
    with pytest.raises(ValueError, match="bytes wide"):
        _delta.state_hash(np.zeros(4, np.uint64), 0)
    delta, _ = _delta.Delta.between(bits, [bits], 0)
    with pytest.raises(ValueError, match="8 elements of 1 bytes"):
        delta.apply(np.zeros(8, np.uint8), 0)
    with pytest.raises(ValueError, match="read-only"):
        delta.apply(np.frombuffer(bytes(16), np.uint16), 0)
    with pytest.raises(ValueError, match="1 to 8 bits"):
        delta.exponents(bits, 2)


MB = 1 << 20


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize(
    ("density", "gbps", "expected"),
    [
        (0.0, 1, Codec.G8S_ZSTD),
        (0.01, 1, Codec.G8S_ZSTD),
        (0.01, 200, Codec.G8S_ZSTD),
        (0.2, 0.08, Codec.EXPONENT),
        (0.2, 200, Codec.G8S),
        (0.5, 0.08, Codec.EXPONENT),
        (0.5, 1, Codec.G8S_ZSTD),
        (0.5, 200, Codec.DENSE),
        (1.0, 1, Codec.G8S_ZSTD),
        (1.0, 400, Codec.DENSE),
    ],
)
def test_the_chosen_codec_depends_on_density_and_link(
    instructions: str, density: float, gbps: float, expected: Codec
) -> None:
    assert choose_codec(round(32 * MB * density), 64 * MB, gbps * 125e6, instructions) is expected


def test_slower_instructions_send_a_half_changed_bucket_dense_over_a_slower_link() -> None:
    """At 5 Gbps, a bucket is sent sooner than a processor without AVX-512 packs it."""
    chosen = {each: choose_codec(16 * MB, 64 * MB, 5 * 125e6, each) for each in INSTRUCTIONS}
    assert chosen.pop("avx512") is Codec.G8S
    assert set(chosen.values()) == {Codec.DENSE}


def test_a_bucket_that_no_codec_shrinks_is_sent_dense() -> None:
    rng = np.random.default_rng(6)
    old, new = rng.integers(0, 65536, (2, 40_000), dtype=np.uint16)
    kept = old.copy()
    patch, change = follow(kept, new, 9)
    codec, payload = pack_for_link(patch, kept, "BF16", 125e6)
    assert codec is Codec.DENSE and payload == new.tobytes()
    base = old.copy()
    assert decode(codec, payload, base).apply_to(base, 9) == change
    np.testing.assert_array_equal(base, new)
    patch, _ = follow(kept, new + np.uint16(1), 9)
    assert pack_for_link(patch, kept, "BF16", 125e6)[0] is Codec.G8S_ZSTD


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("width", WIDTHS)
def test_following_and_comparing_give_the_same_payload(instructions: str, codec: Codec, width: Width) -> None:
    rng = np.random.default_rng(8)
    old = random_bits(rng, width, 150_001)
    for density in DENSITIES:
        new = np.where(rng.random(old.size) < density, old + width(1), old)
        expected = encode(codec, old, new, 31)
        kept = old.copy()
        patch, change = follow(kept, [new[:70_000].copy(), new[70_000:].copy()], 31)
        np.testing.assert_array_equal(kept, new)
        assert (pack_followed(codec, patch, kept, ""), change) == (expected.payload, expected.change)
        np.testing.assert_array_equal(kept, new)
        patch.revert(kept)
        np.testing.assert_array_equal(kept, old)
    frozen = np.frombuffer(bytes(8), np.uint16)
    with pytest.raises(ValueError, match="read-only"):
        follow(frozen, frozen, 0)


def mix64(x: int) -> int:
    mask = 2**64 - 1
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31


def reference_hash(bits: Iterable[int], first_index: int) -> tuple[int, int]:
    mask = 2**64 - 1
    one, two = 0, 0
    for index, value in enumerate(bits, first_index):
        place = ((index + 1) * 0x9E3779B97F4A7C15) & mask
        place ^= place >> 29
        first = mix64((place + int(value) * 0xD6E8FEB86659FD93) & mask)
        second = ((first ^ 0xA0761D6478BD642F) * 0xE7037ED1A0B428DB) & mask
        second ^= second >> 32
        one, two = (one + first) & mask, (two + second) & mask
    return one, two


@settings(deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), max_size=50), first_index=st.integers(0, 2**40))
def test_state_hash_follows_its_written_definition(bits: list[int], first_index: int) -> None:
    assert _delta.state_hash(np.array(bits, np.uint32), first_index) == reference_hash(bits, first_index)


def test_state_hash_adds_up_over_any_cut_and_sees_a_swap() -> None:
    bits = np.random.default_rng(2).integers(0, 65536, 10_000, dtype=np.uint16)
    whole = StateHash.of(bits, 5)
    assert StateHash.of(bits[:3333].copy(), 5) + StateHash.of(bits[3333:].copy(), 5 + 3333) == whole
    swapped = bits.copy()
    swapped[[10, 20]] = bits[[20, 10]]
    assert bits[10] != bits[20] and StateHash.of(swapped, 5) != whole
    assert StateHash.from_hex(str(whole)) == StateHash.from_bytes(whole.to_bytes()) == whole


def test_an_extension_that_was_built_from_other_code_is_named_with_the_fix() -> None:
    old = "from rose import _delta; _delta.INTERFACE = 1; import rose.transfer.format.codec"
    ended = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True, check=False)
    assert re.search(
        r"ImportError: .*_delta\S* has interface 1 and this code needs \d+: .*make setup", ended.stderr
    )
