"""The device's kernels give the processor's bits, on a GPU or thread by thread on the processor."""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from random_bits import WIDTHS, Width, changed_bits
from vmm_worlds import build_stand_in

from rose import _delta
from rose.transfer.format.device.deltas import DeviceDeltas, device_deltas
from rose.transfer.format.device.kernels import compile_kernels, device_kernels

ROOT = Path(__file__).parents[3]

World = tuple[DeviceDeltas, str]
SIZES = (1, 31, 2049, 65_536, 200_003)


@pytest.fixture(params=["steps on the host", pytest.param("gpu", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest) -> World:
    """Returns the device's codec, and the device that its tensors are on."""
    if request.param == "gpu":
        return DeviceDeltas(device_kernels(0)), "cuda"
    return DeviceDeltas(request.getfixturevalue("host_kernels")), "cpu"


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
    with pytest.raises(ValueError, match="1, 2 or 4 bytes wide, got 8"):
        deltas.between(x.view(torch.int64), x.view(torch.int64), 0)
    bits = np.zeros(32, np.uint16)
    delta, _ = _delta.Delta.between(bits, [bits], 0)
    with pytest.raises(ValueError, match="64 elements of 2 bytes, the difference 32"):
        deltas.apply(delta, x, 0)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_compile_without_a_gpu_or_a_toolkit(architecture: str) -> None:
    _require_nvrtc()
    assert compile_kernels(architecture).startswith(b"\x7fELF")


def test_an_architecture_that_nvrtc_does_not_know_is_named() -> None:
    _require_nvrtc()
    with pytest.raises(RuntimeError, match="NVRTC refuses the delta kernels for sm_1"):
        compile_kernels("sm_1")


@pytest.mark.slow
def test_the_driver_gets_the_kernels_arguments_from_cuda_python(tmp_path: Path) -> None:
    """In a process of its own, as everything there finds the stand-in for the driver."""
    pytest.importorskip("cuda.bindings", reason="cuda-python is not installed")
    build_stand_in(tmp_path)
    code = """
import numpy as np, torch
from rose import _delta
from rose.transfer.format.device.deltas import DeviceDeltas
from rose.transfer.format.device.kernels import DeviceKernels
old = np.arange(70_001, dtype=np.uint16)
new = old + (old % 5 == 0)
expected, lanes = _delta.Delta.between(old, [new], 2**40)
deltas = DeviceDeltas(DeviceKernels(0, b"no code"))
x, y = (torch.from_numpy(bits.view(np.int16)) for bits in (old, new))
delta, change = deltas.between(x, y, 2**40)
assert (delta.g8s(), change) == (expected.g8s(), lanes)
assert deltas.apply(expected, x, 2**40) == lanes and torch.equal(x, y)
print("equal")
"""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, text=True, capture_output=True, env=environment
    )
    assert done.stdout == "equal\n", done.stderr


def _require_nvrtc() -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-python is not installed")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"no NVRTC: {error}")


def test_the_processors_codec_is_chosen_for_tensors_in_host_memory() -> None:
    assert device_deltas(torch.device("cpu")) is None
    assert device_deltas(None) is None


def test_without_a_driver_or_cuda_python_the_processor_is_chosen_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert device_deltas(torch.device("cuda", 100)) is None
    (record,) = caplog.records
    assert "codec=processor: weights are on cuda:100" in record.message


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
