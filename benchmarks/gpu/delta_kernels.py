"""The delta codec's kernels: their bits beside the processor's, their speed beside the memory's bandwidth."""

import numpy as np
import torch
from lib.harness import median_figure

from gpu.rig import GpuRig
from rose import _delta
from rose.measure.figures import Figure
from rose.transfer.format.device.deltas import DeviceDeltas
from rose.transfer.format.device.kernels import WIDTHS, DeviceKernels, device_kernels

DENSITIES = (0.0136, 0.194)
FIRST_INDEX = 1 << 40


def measure(rig: GpuRig) -> list[Figure]:
    """Compares each width and density, then times buckets of bf16."""
    # The stand-in has no compute capability to compile for, and looks at no code.
    deltas = DeviceDeltas(DeviceKernels(0, b"no code") if rig.is_dry else device_kernels(0))
    rng = np.random.default_rng(0)
    differing = sum(
        not _is_equal(rig, deltas, rng, width, density)
        for width in WIDTHS
        for density in (0.0, *DENSITIES, 1.0)
    )
    figures = [Figure(name="delta_differing_cases", value=differing, unit="cases", target="0")]
    size = 1 << (17 if rig.is_dry else 25)
    for density in DENSITIES:
        figures += _speed(rig, deltas, rng, size, density)
    return figures


def _bits(
    rng: np.random.Generator, size: int, width: int, density: float
) -> tuple[torch.Tensor, torch.Tensor]:
    old = rng.integers(0, 256, size * width, dtype=np.uint8).view(f"u{width}")
    new = old + (rng.random(size) < density).astype(old.dtype)
    signed = {1: "u1", 2: "i2", 4: "i4"}[width]
    return torch.from_numpy(old.view(signed)), torch.from_numpy(new.view(signed))


def _is_equal(
    rig: GpuRig, deltas: DeviceDeltas, rng: np.random.Generator, width: int, density: float
) -> bool:
    old, new = _bits(rng, 300_007, width, density)
    host_old, host_new = (bits.numpy().view(f"u{width}") for bits in (old, new))
    expected, lanes = _delta.Delta.between(host_old, [host_new], FIRST_INDEX)
    x, y = old.to(rig.device), new.to(rig.device)
    delta, change = deltas.between(x, y, FIRST_INDEX)
    applied = deltas.apply(expected, x, FIRST_INDEX)
    return (delta.g8s(), change, applied) == (expected.g8s(), lanes, lanes) and torch.equal(x, y)


def _speed(
    rig: GpuRig, deltas: DeviceDeltas, rng: np.random.Generator, size: int, density: float
) -> list[Figure]:
    old, new = (bits.to(rig.device) for bits in _bits(rng, size, 2, density))
    delta, _ = deltas.between(old, new, 0)
    copied = torch.empty_like(old)
    times: dict[str, list[float]] = {"find": [], "apply": [], "copy": []}
    for _ in range(rig.count(40)):
        times["copy"].append(rig.time_us(lambda: copied.copy_(new)))
        times["find"].append(rig.time_us(lambda: deltas.between(old, new, 0)))
        copied.copy_(old)
        times["apply"].append(rig.time_us(lambda: deltas.apply(delta, copied, 0)))
    num_bytes = 2 * old.numel() * old.element_size()  # each reads or writes two vectors
    rates = {name: [num_bytes / each / 1e3 for each in values] for name, values in times.items()}
    copy = median_figure("", rates["copy"], "").value
    return [
        median_figure(f"delta_{name}_gb_s[{density:.1%}]", rates[name], "GB/s", peers={"copy": copy})
        for name in ("find", "apply")
    ]
