"""Copies of torch storages from their device to host memory and back.

Each byte is copied once each way. On a CPU all cores copy. On a GPU the host's memory is pinned when it is
first used, the copies of all storages are queued, and the process waits for the device once.
"""

import ctypes
import logging
import mmap
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from rose.scheduler.runtime.job.copying import copy_arrays

logger = logging.getLogger(__name__)

Array = npt.NDArray[np.generic]
Copy = tuple[torch.UntypedStorage, Array]
"""A storage, and its bytes in host memory."""

_libc = ctypes.CDLL(None)
_HUGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
"""Of Linux 6.1; Python has no name for it."""


def to_host(copies: Sequence[Copy]) -> None:
    """Fills the arrays from the storages, after all that the devices still compute."""
    on_device, on_cpu = _by_device(copies)
    _wait(on_device)
    for storage, array in on_device:
        _tensor(array).copy_(storage_bytes(storage), non_blocking=True)
    copy_arrays((array, _memory(storage)) for storage, array in on_cpu)
    _wait(on_device)


def to_device(copies: Sequence[Copy]) -> None:
    """Fills the storages from the arrays."""
    on_device, on_cpu = _by_device(copies)
    for storage, array in on_device:
        storage_bytes(storage).copy_(_tensor(array), non_blocking=True)
    copy_arrays((_memory(storage), array) for storage, array in on_cpu)
    _wait(on_device)


def allocate(wanted: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
    """Gives empty storages as many bytes as wanted.

    On a CPU the memory has huge pages where the kernel allows them. A copy to new small pages takes several
    times as long, because the kernel fills each one with zeros in a fault of its own.
    """
    for storage, num_bytes in wanted:
        storage.resize_(num_bytes)
    large = [each for each, _ in wanted if each.device.type == "cpu" and each.nbytes() >= _HUGE_BYTES]
    for storage in large:
        begin = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE) * mmap.PAGESIZE
        _advise(begin, end, _MADV_HUGEPAGE)
    # malloc has written its header before the memory, and so the first page is there as a small one.
    for storage in large:
        begin = storage.data_ptr() // _HUGE_BYTES * _HUGE_BYTES
        _advise(begin, begin + _HUGE_BYTES, _MADV_COLLAPSE)


def free(storages: Sequence[torch.UntypedStorage]) -> None:
    """Gives the storages' memory to other processes: what they leave, torch and the C library would keep."""
    kinds = {storage.device.type for storage in storages}
    for storage in storages:
        storage.resize_(0)
    if "cuda" in kinds:
        torch.cuda.empty_cache()
    if "cpu" in kinds and hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


class PinnedMemory:
    """Host memory that stays pinned, for direct copies, until other memory takes its place."""

    def __init__(self) -> None:
        self._memory: Array | None = None

    def pin(self, memory: Array) -> None:
        """Pins this memory instead of the last. Does nothing without a GPU, or if it is pinned already."""
        held = self._memory
        has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if memory is held or memory.nbytes == 0 or not has_gpu:
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if held is not None:
            runtime.cudaHostUnregister(held.ctypes.data)
            self._memory = None
        status = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if int(status) != 0:
            logger.warning(
                "host memory is not pinned, copies are slow bytes=%d cuda=%s", memory.nbytes, status
            )
            with suppress(RuntimeError):  # else the next kernel would raise this call's error
                torch.zeros(1, device="cuda").add_(1)
            return
        self._memory = memory


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns the storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _by_device(copies: Sequence[Copy]) -> tuple[list[Copy], list[Copy]]:
    on_cpu = [each for each in copies if each[0].device.type == "cpu"]
    return [each for each in copies if each[0].device.type != "cpu"], on_cpu


def _advise(begin: int, end: int, advice: int) -> None:
    """Tells the kernel how to back memory. If it refuses, the memory has small pages, and works as well."""
    if sys.platform == "linux":
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def _wait(copies: Sequence[Copy]) -> None:
    for device in {storage.device for storage, _ in copies}:
        torch.accelerator.synchronize(device)


def _memory(storage: torch.UntypedStorage) -> Array:
    # Not through torch's numpy(): that makes the storage one that can't be resized any more.
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return np.frombuffer(memoryview(memory), np.uint8)


def _tensor(array: Array) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the arrays of a kept set are read-only, and are only read
        return torch.from_numpy(np.asarray(array))
