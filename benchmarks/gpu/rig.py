"""What the parts of the GPU kit measure with: the driver, torch on the GPU, and a clock.

In a dry run the stand-in driver has the driver's place and torch computes on the processor, over the same
memory. Then every figure says that the part runs, and nothing about a GPU.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch

from rose.memory.slabs.backend import CudaBackend, SlabRange, Slabs

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


class GpuRig:
    """One GPU, or the stand-in driver."""

    def __init__(self, *, is_dry: bool, is_quick: bool) -> None:
        """Raises: VmmError without a driver."""
        self.is_dry = is_dry
        self.is_quick = is_quick
        self.backend = CudaBackend(0)
        self.device = torch.device("cpu" if is_dry else "cuda:0")

    def slab_bytes(self, num_mib: int) -> int:
        """Returns the bytes of a slab: small ones in a dry run."""
        return self.backend.granularity if self.is_dry else num_mib * MIB

    def count(self, number: int) -> int:
        """Returns how often to repeat something that a full run repeats ``number`` times."""
        return max(2, number // 20) if self.is_quick else number

    def tensor(self, range_: SlabRange) -> torch.Tensor:
        """Returns the whole range as int8. Position 0 must be mapped, and an unmapped one not touched."""
        if not self.is_dry:
            return torch.as_tensor(range_, device=self.device)
        memory = (ctypes.c_int8 * range_.num_bytes).from_address(range_.address)
        return torch.frombuffer(memory, dtype=torch.int8)

    def sync(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize()

    def stream(self) -> int:
        return 0 if self.is_dry else int(torch.cuda.current_stream().cuda_stream)

    def time_us(self, work: Callable[[], object]) -> float:
        """Returns the time from an idle device to an idle device."""
        self.sync()
        start = perf_counter()
        work()
        self.sync()
        return 1e6 * (perf_counter() - start)

    def start_player(self, script: str, slabs: Slabs, arguments: Sequence[object]) -> "subprocess.Popen[str]":
        """Starts a script of this folder: ``script IS_DRY NUM_FDS FD.. ARGUMENT..``, with the slabs' fds."""
        fds = [slabs.export(index) for index in range(slabs.num_fds)]
        argv = [sys.executable, str(Path(__file__).with_name(script)), int(self.is_dry), len(fds), *fds]
        try:
            return subprocess.Popen(
                [str(each) for each in (*argv, *arguments)],
                pass_fds=fds,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        finally:
            for fd in fds:
                os.close(fd)


class Matmuls:
    """Kernels that fill the GPU for as long as is wanted."""

    def __init__(self, device: torch.device) -> None:
        size = 64 if device.type == "cpu" else 4096
        self._device = device
        self._factors = torch.ones(size, size, device=device, dtype=torch.bfloat16)
        self._product = torch.empty_like(self._factors)
        self._one_s = min(self._time(1), self._time(1), self._time(1))

    def __call__(self, seconds: float) -> None:
        """Computes for about that long, and waits for the end."""
        self._time(max(1, round(seconds / self._one_s)))

    def _time(self, number: int) -> float:
        start = perf_counter()
        for _ in range(number):
            torch.matmul(self._factors, self._factors, out=self._product)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter() - start
