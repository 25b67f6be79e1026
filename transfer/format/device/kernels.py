"""The delta codec's CUDA kernels: NVRTC compiles them at first use, and the driver starts them.

Both are reached through cuda-python, which the ``cuda`` extra installs, so nobody needs a CUDA toolkit. The
sources are in ``cuda/`` beside this file. A call starts a kernel on a stream and never waits; all pointers
are device memory. cuda/delta.cu says what the buffers hold.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).with_name("cuda")
WIDTHS = (1, 2, 4)

THREADS = 256
"""Threads of a block."""
_CAPABILITY = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY"
_GROUP, _RUN, _BLOCK = 32, 2048, 65536
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_uint64

_STANDARD = {
    "cstddef": "namespace std { using size_t = decltype(sizeof(0)); }",
    "cstdint": """
        using uint64_t = unsigned long long;
        namespace std {
        using uint8_t = unsigned char; using uint16_t = unsigned short; using uint32_t = unsigned int;
        using uint64_t = unsigned long long; using int64_t = long long; using uintptr_t = unsigned long long;
        }""",
}
"""NVRTC has no standard headers. These are what the sources use of them."""


def compile_kernels(architecture: str) -> bytes:
    """Returns the kernels' code for an architecture such as "sm_90". It needs no GPU.

    Raises: ImportError without cuda-python, RuntimeError where NVRTC is missing or refuses.
    """
    from cuda.bindings import nvrtc

    headers = _STANDARD | {file.name: file.read_text() for file in SOURCES.glob("*.hpp")}
    texts = [text.encode() for text in headers.values()]
    names = [name.encode() for name in headers]
    source = (SOURCES / "delta.cu").read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(source, b"delta.cu", len(names), texts, names))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++20"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"NVRTC refuses the delta kernels for {architecture}: {log.decode().strip()}")
        code: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@lru_cache
def device_kernels(device: int) -> "DeviceKernels":
    """Returns the kernels of a GPU, compiled once in this process.

    Raises: ImportError without cuda-python, RuntimeError where the driver or NVRTC fails.
    """
    from cuda.bindings import driver

    _checked(driver.cuInit(0))
    handle, attributes = _checked(driver.cuDeviceGet(device)), driver.CUdevice_attribute
    major, minor = (
        _checked(driver.cuDeviceGetAttribute(getattr(attributes, f"{_CAPABILITY}_{part}"), handle))
        for part in ("MAJOR", "MINOR")
    )
    return DeviceKernels(device, compile_kernels(f"sm_{major}{minor}"))


class DeviceKernels:
    """The kernels, loaded into the primary context of a device, which is torch's too. Any thread may call."""

    def __init__(self, device: int, code: bytes) -> None:
        """Raises: ImportError, RuntimeError."""
        from cuda.bindings import driver

        self._driver = driver
        _checked(driver.cuInit(0))
        self._context = _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device))))
        with self._current():
            module = _checked(driver.cuModuleLoadData(code))
            names = ["count", *(f"{name}_{width}" for name in ("mark", "compact", "add") for width in WIDTHS)]
            self._functions = {
                name: _checked(driver.cuModuleGetFunction(module, name.encode())) for name in names
            }

    def mark(
        self, width: int, before: int, after: int, size: int, masks: int, counts: int, stream: int
    ) -> None:
        """Finds the changed elements. Raises: RuntimeError."""
        arguments = [(before, _POINTER), (after, _POINTER), (size, _NUMBER), (masks, _POINTER)]
        self._start(f"mark_{width}", -(-size // _GROUP), arguments, stream)
        arguments = [(masks, _POINTER), (size, _NUMBER), (counts, _POINTER)]
        self._start("count", -(-size // _RUN), arguments, stream)

    def compact(
        self,
        width: int,
        before: int,
        after: int,
        size: int,
        first_index: int,
        buffers: list[int],
        stream: int,
    ) -> None:
        """Writes the changes. ``buffers``: masks, offsets, places, differences, change.

        Raises: RuntimeError.
        """
        arguments = [(before, _POINTER), (after, _POINTER), (size, _NUMBER), (first_index, _NUMBER)]
        arguments += [(buffer, _POINTER) for buffer in buffers]
        self._start(f"compact_{width}", -(-size // _GROUP), arguments, stream)

    def add(
        self,
        width: int,
        base: int,
        size: int,
        first_index: int,
        parts: list[int],
        is_reverse: bool,
        change: int,
        stream: int,
    ) -> None:
        """Applies changes. ``parts``: starts, places, differences. Raises: RuntimeError."""
        arguments = [(base, _POINTER), (first_index, _NUMBER), *((part, _POINTER) for part in parts)]
        arguments += [(int(is_reverse), ctypes.c_int), (change, _POINTER)]
        self._start(f"add_{width}", -(-size // _BLOCK) * THREADS, arguments, stream)

    def _start(self, name: str, num_threads: int, arguments: list[tuple[int, Any]], stream: int) -> None:
        if num_threads == 0:
            return
        values, types = zip(*arguments, strict=True)
        grid = (-(-num_threads // THREADS), 1, 1)
        with self._current():
            launched = self._driver.cuLaunchKernel(
                self._functions[name], *grid, THREADS, 1, 1, 0, stream, (values, types), 0
            )
            _checked(launched, name)

    @contextmanager
    def _current(self) -> Iterator[None]:
        _checked(self._driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent()


def _checked(answer: Any, what: str = "delta kernels") -> Any:
    """Returns what a call of cuda-python returned beside its status. Raises: RuntimeError."""
    status, *values = answer
    if status.value != 0:
        raise RuntimeError(f"{what}: {status.name}")
    return values[0] if values else None
