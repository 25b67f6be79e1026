"""The device's kernels give the processor's bits, on a GPU or thread by thread on the processor."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from random_bits import WIDTHS, Width, changed_bits

from rose import _delta
from rose.transfer.format.device_delta import DeviceDeltas, device_deltas

World = tuple[DeviceDeltas, str]
SIZES = (1, 31, 2049, 65_536, 200_003)


@pytest.fixture(params=["steps on the host", pytest.param("gpu", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest) -> World:
    """Returns the device's codec, and the device that its tensors are on."""
    if request.param == "gpu":
        return DeviceDeltas(request.getfixturevalue("cuda_library")), "cuda"
    return DeviceDeltas(request.getfixturevalue("host_library")), "cpu"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_the_device_finds_and_applies_the_processors_difference(
    world: World, width: Width, density: float
) -> None:
    deltas, device = world
    rng = np.random.default_rng(3)
    for size in SIZES:
        old, new = changed_bits(rng, width, size + 1, density)
        # Also from the second element on, so that groups are not aligned.
        for begin in (0, 1):
            a, b = old[begin : begin + size], new[begin : begin + size]
            expected, lanes = _delta.Delta.between(a, [b], 12_345)
            on_device = [
                torch.from_numpy(bits.view(f"i{bits.itemsize}" if bits.itemsize > 1 else "u1")).to(device)
                for bits in (old, new)
            ]
            x, y = (tensor[begin : begin + size] for tensor in on_device)
            delta, change = deltas.between(x, y, 12_345)
            assert (delta.g8s(), delta.coo(), change) == (expected.g8s(), expected.coo(), lanes)
            base = x.clone()
            assert deltas.apply(expected, base, 12_345) == lanes and torch.equal(base, y)
            back = deltas.revert(expected, base, 12_345)
            assert back == tuple(-lane % 2**64 for lane in lanes) and torch.equal(base, x)


def test_tensors_that_do_not_fit_are_refused_before_a_kernel_runs(world: World) -> None:
    deltas, device = world
    x = torch.zeros(64, dtype=torch.int16, device=device)
    with pytest.raises(ValueError, match="64 elements of 2 bytes"):
        deltas.between(x, x[:32], 0)
    with pytest.raises(ValueError, match="contiguous"):
        deltas.between(x[::2], x[::2], 0)
    with pytest.raises(RuntimeError, match="1, 2 or 4 bytes"):
        deltas.between(x.view(torch.int64), x.view(torch.int64), 0)
    bits = np.zeros(32, np.uint16)
    delta, _ = _delta.Delta.between(bits, [bits], 0)
    with pytest.raises(ValueError, match="64 elements of 2 bytes, the difference 32"):
        deltas.apply(delta, x, 0)


def test_the_kernels_compile_and_export_their_calls(cuda_library: Path) -> None:
    DeviceDeltas(cuda_library)


def test_the_processors_codec_is_chosen_for_tensors_in_host_memory(host_library: Path) -> None:
    assert device_deltas(torch.device("cpu"), host_library) is None
    assert device_deltas(None, host_library) is None


def test_the_kernels_are_chosen_for_a_device_that_has_them(
    host_library: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(device_deltas(torch.device("cuda", 1), host_library), DeviceDeltas)
    assert f"codec=cuda:1: kernels of {host_library}" in caplog.text


def test_without_kernels_the_processor_is_chosen_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert device_deltas(torch.device("cuda", 0), tmp_path / "missing.so") is None
    (record,) = caplog.records
    assert "codec=processor" in record.message and "make cuda" in record.message
    assert "cuda:0" in record.message and "missing.so" in record.message


def test_parts_that_form_no_valid_difference_are_refused() -> None:
    counts, places, differences = np.array([2], np.uint32), np.array([3, 9], np.uint16), np.ones(2, np.uint16)
    delta = _delta.Delta.from_parts(counts, places, differences, 10)
    given: list[NDArray[Any]] = [counts, places, differences]
    found: Sequence[NDArray[Any]] = delta.parts()
    assert all(np.array_equal(a, b) for a, b in zip(found, given, strict=True))
    for broken in (
        (counts, places, differences, 9),
        (counts, places[::-1].copy(), differences, 10),
        (counts, places, differences * np.uint16(0), 10),
        (counts - np.uint32(1), places, differences, 10),
        (counts + np.uint32(1), places, differences, 10),
        (counts, places, differences, 70_000),
    ):
        with pytest.raises(_delta.MalformedStream):
            _delta.Delta.from_parts(*broken)
    with pytest.raises(ValueError, match="as many"):
        _delta.Delta.from_parts(counts, places[:1].copy(), differences, 10)
