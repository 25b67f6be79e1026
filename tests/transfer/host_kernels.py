"""The delta codec's kernels on the processor: the product's calls, without a driver and its launches."""

import ctypes
from pathlib import Path
from typing import Any

from rose.transfer.format.device.kernels import THREADS, DeviceKernels


class HostKernels(DeviceKernels):
    """Runs each kernel thread by thread (tests/memory/kernels_on_host.cpp)."""

    def __init__(self, library: Path) -> None:
        self._launch = ctypes.CDLL(str(library)).launch_on_host
        self._launch.restype = ctypes.c_bool

    def _start(self, name: str, num_threads: int, arguments: list[tuple[int, Any]], stream: int) -> None:
        if num_threads == 0:
            return
        values = [kind(value) for value, kind in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        assert self._launch(name.encode(), -(-num_threads // THREADS), pointers), f"no kernel {name}"
