"""The worlds in which slab backends are tested: the host, the stand-in driver, a real GPU.

Owns how a test looks into memory: directly on the host, by the driver's copies elsewhere.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rose.memory.slabs.backend import Backend, CudaBackend, HostBackend, SlabRange
from rose.transfer.format.device.kernels import SOURCES as KERNELS

_LOCATION_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
FOLDER = Path(__file__).parent
STAND_IN_SOURCES = ("stand_in_cuda.cpp", "stand_in_modules.cpp", "stand_in_green.cpp", "kernels_on_host.cpp")


def build_library(library: Path, *sources: str) -> Path:
    """Compiles C++ files of this folder into a library; skips the test where there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        import pytest  # not needed in the processes that tests start

        pytest.skip("no C++ compiler for the stand-in CUDA driver")
    options = ["-std=c++20", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-I", str(KERNELS)]
    paths = [str(FOLDER / source) for source in sources]
    subprocess.run([compiler, *options, *paths, "-o", str(library), "-ldl"], check=True)
    return library


def build_stand_in(folder: Path) -> Path:
    """Compiles the stand-in driver, under the driver's own name."""
    return build_library(folder / "libcuda.so.1", *STAND_IN_SOURCES)


class World:
    """A backend, and a test's eyes and hands in its memory."""

    def __init__(self, library: str | None = None) -> None:
        """``library``: the CUDA driver; None is the host."""
        self.library = library
        self.backend: Backend = HostBackend() if library is None else CudaBackend(0, library)
        self.slab_bytes = self.backend.granularity
        if library is not None:
            self.driver = ctypes.CDLL(library)
            self._context = ctypes.c_void_p()
            assert self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0) == 0

    def close(self) -> None:
        if self.library is not None:
            self.driver.cuDevicePrimaryCtxRelease_v2(0)

    def read(self, range_: SlabRange, position: int) -> set[int]:
        """The bytes found at a mapped or guarded position. Raises: OSError where it can't be read."""
        if self.library is None:
            content = self._view(range_, position).tobytes()
        else:
            copied = ctypes.create_string_buffer(self.slab_bytes)
            self._copy("cuMemcpyDtoH_v2", copied, self._address(range_, position))
            content = copied.raw
        return set(content)

    def write(self, range_: SlabRange, position: int, byte: int) -> None:
        """Fills a mapped position. Raises: OSError where it can't be written."""
        if self.library is None:
            self._view(range_, position)[:] = byte
        else:
            content = bytes([byte]) * self.slab_bytes
            self._copy("cuMemcpyHtoD_v2", self._address(range_, position), content)

    def accesses(self, range_: SlabRange) -> list[str]:
        """What may be done at each position: "rw", "r" or ""."""
        if self.library is None:
            return _kernel_accesses(range_)
        return [self._access(range_, position) for position in range(range_.num_positions)]

    def _access(self, range_: SlabRange, position: int) -> str:
        flags = ctypes.c_uint64()
        location = (ctypes.c_int * 2)(_LOCATION_DEVICE, 0)
        error = self.driver.cuMemGetAccess(ctypes.byref(flags), location, self._address(range_, position))
        return {0: "", 1: "r", 3: "rw"}[flags.value if error == 0 else 0]

    def _view(self, range_: SlabRange, position: int) -> npt.NDArray[np.uint8]:
        whole = np.frombuffer(memoryview(range_), dtype=np.uint8)  # type: ignore[arg-type]
        return whole[position * self.slab_bytes : (position + 1) * self.slab_bytes]

    def _address(self, range_: SlabRange, position: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(range_.address + position * self.slab_bytes)

    def _copy(self, name: str, to: object, source: object) -> None:
        popped = ctypes.c_void_p()
        assert self.driver.cuCtxPushCurrent_v2(self._context) == 0
        try:
            error = getattr(self.driver, name)(to, source, ctypes.c_size_t(self.slab_bytes))
        finally:
            self.driver.cuCtxPopCurrent_v2(ctypes.byref(popped))
        if error != 0:
            raise OSError(error, f"{name} failed")


def _kernel_accesses(range_: SlabRange) -> list[str]:
    areas = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags = line.split()[:2]
        start, end = (int(each, 16) for each in span.split("-"))
        areas.append((start, end, flags[:2].rstrip("-")))
    found = []
    for position in range(range_.num_positions):
        at = range_.address + position * range_.slab_bytes
        found.append(next(flags for start, end, flags in areas if start <= at < end))
    return found
