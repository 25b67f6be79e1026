"""What each call of the driver costs, by the size of a slab, without ROSE's code around it."""

import ctypes
import os
from collections import defaultdict
from time import perf_counter
from typing import Any

import torch
from lib.harness import median_figure

from gpu.rig import GpuRig
from rose.measure.figures import Figure
from rose.memory.slabs.backend import CUDA_DRIVER

SIZES_MIB = (2, 4, 8, 16, 32, 64, 128)
_PINNED, _FILE_DESCRIPTOR, _DEVICE, _READ_WRITE = 1, 1, 1, 3


class _Allocation(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    ]


class RawDriver:
    """The driver's calls, each timed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(CUDA_DRIVER)
        self._allocation = _Allocation(_PINNED, _FILE_DESCRIPTOR, _DEVICE, 0, None, 0)
        self._access = (ctypes.c_int * 3)(_DEVICE, 0, _READ_WRITE)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._call("cuInit", 0)

    def cycle(self, num_bytes: int) -> None:
        """Makes a slab, hands it on, maps it, and gives everything back."""
        size, handle, imported, fd = (
            ctypes.c_size_t(num_bytes),
            ctypes.c_uint64(),
            ctypes.c_uint64(),
            ctypes.c_int(),
        )
        start = ctypes.c_uint64()
        nothing = ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._allocation), nothing)
        self._call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _FILE_DESCRIPTOR, nothing)
        carried = ctypes.c_void_p(fd.value)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(imported), carried, _FILE_DESCRIPTOR)
        os.close(fd.value)
        self._call("cuMemAddressReserve", ctypes.byref(start), size, ctypes.c_size_t(0), nothing, nothing)
        self._call("cuMemMap", start, size, ctypes.c_size_t(0), imported, nothing)
        self._call("cuMemSetAccess", start, size, self._access, ctypes.c_size_t(1))
        self._call("cuMemUnmap", start, size)
        self._call("cuMemAddressFree", start, size)
        self._call("cuMemRelease", imported)
        self._call("cuMemRelease", handle)

    def _call(self, name: str, *arguments: Any) -> None:
        call = getattr(self._library, name)
        start = perf_counter()
        error = call(*arguments)
        self.seconds[name].append(perf_counter() - start)
        if error != 0:
            raise RuntimeError(f"{name}: error {error}")


def measure(rig: GpuRig) -> list[Figure]:
    """Times a slab's whole life for each size."""
    torch.empty(1, device=rig.device)  # makes a context, as every process has that maps slabs
    figures = []
    for num_mib in SIZES_MIB[:: 3 if rig.is_quick else 1]:
        driver = RawDriver()
        for _ in range(rig.count(100)):
            driver.cycle(rig.slab_bytes(num_mib))
        figures += [
            median_figure(f"{name}_us[{num_mib}MiB]", [1e6 * each for each in times], "us")
            for name, times in driver.seconds.items()
            if name != "cuInit"
        ]
    return figures
