"""Shares of the GPU's multiprocessors, as two jobs under `rose sched multiplex --gpu` have them."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from lib.harness import median_figure

from gpu.rig import GpuRig, Matmuls
from rose.config import mps_folder
from rose.measure.figures import Figure
from rose.scheduler.runtime.channel.messages import Shared
from rose.scheduler.runtime.job.multiprocessors import GreenContexts, Multiprocessors

WORK_S = 0.02
PATIENCE_S = 60.0


def measure(rig: GpuRig) -> list[Figure]:
    """Takes the GPU apart, then times kernels on half of it, alone and beside another process's half."""
    gpu = Multiprocessors()
    half = gpu.num // 2
    parts = [gpu.stream(numbers)[1] for numbers in _halves(gpu.num)]
    peers: dict[str, float | None] = {"wanted": half, "second part": parts[1], "of": gpu.num}
    figures = [Figure(name="green_sms", value=parts[0], unit="SMs", peers=peers)]
    if rig.is_dry:  # the stand-in runs no torch
        return [*figures, Figure(name="green_half_slowdown", value=None, unit="x")]
    device, matmuls = GreenContexts(), Matmuls(rig.device)
    shares = [_share(numbers) for numbers in (range(gpu.num), *_halves(gpu.num))]
    device.take(shares[0])

    def times(number: int) -> list[float]:
        device.take(shares[number])
        return [rig.time_us(lambda: matmuls(WORK_S)) for _ in range(rig.count(20))]

    whole_us = min(times(0))
    confined = [each / whole_us for each in times(1)]
    figures.append(median_figure("green_half_slowdown", confined, "x", peers={"of the whole": 1.0}))
    switches = [rig.time_us(partial(device.take, shares[number % 3])) for number in range(rig.count(60))]
    figures.append(median_figure("green_switch_us", switches, "us"))
    figures.append(
        Figure(name="green_wrong_sums", value=_wrong_sums(device, shares), unit="elements", target="= 0")
    )
    return [*figures, _beside(rig, times)]


def _halves(num: int) -> tuple[range, range]:
    return range(num // 2), range(num // 2, num)


def _share(numbers: range) -> Shared:
    return Shared(epoch=1, cores=list(numbers), compute=0.5, memory=0.5)


def _wrong_sums(device: GreenContexts, shares: Sequence[Shared]) -> int:
    """Adds 1 to numbers under one share after the other, with memory that comes and goes in between."""
    found = torch.zeros(1 << 24, device="cuda")
    for number in range(300):
        device.take(shares[number % len(shares)])
        ones = torch.ones_like(found)
        found += ones
        del ones
    return int((found != 300).sum())


def _beside(rig: GpuRig, times: Callable[[int], list[float]]) -> Figure:
    """Times the first half while another process computes on the second one."""
    name = "green_beside_slowdown[two processes under MPS]"
    if not (mps_folder() / "control").exists():
        return Figure(name=name, value=None, unit="x", peers={"MPS server": 0.0})
    alone_us = min(times(1))
    player = subprocess.Popen(
        [sys.executable, "-m", "gpu.shares"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert player.stdout is not None
        player.stdout.readline()
        beside = [each / alone_us for each in times(1)]
        player.communicate("end\n", timeout=PATIENCE_S)
    finally:
        player.kill()
        player.communicate()
    return median_figure(name, beside, "x", target="<= 1.3")


def main() -> int:
    """The other process: computes on the second half until a line comes in."""
    device, matmuls = GreenContexts(), Matmuls(torch.device("cuda:0"))
    _, second = _halves(Multiprocessors().num)
    device.take(_share(second))
    print("computes", flush=True)
    os.set_blocking(0, False)
    while not sys.stdin.readline():
        matmuls(WORK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
