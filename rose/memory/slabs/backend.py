"""Where slabs live: host memory or a GPU's, behind one interface.

Owns the interface and the choice by name. Promises the same rules on both: a mapping is one whole slab at
one whole position, nothing is mapped twice, and a batch happens whole or not at all. Never decides which
slab goes where.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from rose._vmm import CudaDevice, CudaSlabs, SlabFile, host_granularity
from rose.memory.slabs.fd_limit import ensure_fd_limit

CUDA_DRIVER = "libcuda.so.1"


class BackendKind(StrEnum):
    """What a pool's memory is."""

    HOST = "host"
    CUDA = "cuda"


class SlabRange(Protocol):
    """Address space of ``num_positions`` slabs. Calls may come from any thread.

    Made with ``poison``, it fills a slab with 0xFF, NaN in every float format, before unmapping it: whoever
    maps without zeroing and reads, notices. A batch that fails after that is undone, but not the poison.
    Made with ``guard``, unmapped positions read as zeros instead of faulting (writes fault): a stray read
    under MPS would end every client of the GPU.
    """

    @property
    def address(self) -> int: ...
    @property
    def num_positions(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def slab_bytes(self) -> int: ...

    def map_many(self, positions: list[int], slabs: list[int], *, zero: bool = True) -> None:
        """``slabs[i]`` goes to ``positions[i]``, all or none of them; zeroed when this returns.

        Raises: ValueError for a mapped position or slab, VmmError where the system or the driver fails.
        """
        ...

    def unmap_many(self, positions: list[int], *, fence: bool = True) -> None:
        """All or none. ``fence`` waits for this process's work on the device; skip it only if that is done.

        Raises: ValueError where nothing is mapped, VmmError.
        """
        ...

    def map(self, position: int, slab: int, *, zero: bool = True) -> None: ...
    def unmap(self, position: int, *, fence: bool = True) -> None: ...

    def zero(self, position: int) -> None:
        """Fills a mapped position with zeros; done when it returns. Raises: ValueError, VmmError."""
        ...

    def fence(self) -> None:
        """Returns when no work of this process touches the range any more. Raises: VmmError."""
        ...

    def slab_at(self, position: int) -> int | None: ...

    def mapped(self) -> list[tuple[int, int]]:
        """(position, slab) pairs, ascending."""
        ...


class Slabs(Protocol):
    """A pool's physical memory, as this process sees it: ``num_slabs`` equal pieces."""

    @property
    def num_slabs(self) -> int: ...
    @property
    def slab_bytes(self) -> int: ...
    @property
    def num_fds(self) -> int:
        """Descriptors that carry all slabs to another process: 1 on the host, one per slab on CUDA."""
        ...

    def export(self, index: int) -> int:
        """A new descriptor, the caller's to close: the ``index``-th of ``num_fds``. Raises: VmmError."""
        ...

    def reserve(self, num_positions: int, *, poison: bool = False, guard: bool = False) -> SlabRange:
        """Address space for ``num_positions`` of these slabs. Raises: ValueError, VmmError."""
        ...


class Backend(Protocol):
    """Makes slabs of one kind of memory."""

    @property
    def granularity(self) -> int:
        """A slab's size must be a multiple of this many bytes."""
        ...

    def create(self, num_slabs: int, slab_bytes: int, name: str) -> Slabs:
        """New memory; ``name`` shows in the system's lists where it has any.

        Raises: ValueError for a bad size, VmmError, ConfigError where the descriptor limit is too low.
        """
        ...

    def adopt(self, fds: Sequence[int], slab_bytes: int) -> Slabs:
        """Opens what another process exported; the caller still closes ``fds``.

        Before receiving that many, call :func:`ensure_fd_limit`: what doesn't fit is lost.
        Raises: as create().
        """
        ...


class HostBackend:
    """Slabs in a memfd."""

    @property
    def granularity(self) -> int:
        return host_granularity()

    def create(self, num_slabs: int, slab_bytes: int, name: str) -> SlabFile:
        return SlabFile.create(num_slabs, slab_bytes, name)

    def adopt(self, fds: Sequence[int], slab_bytes: int) -> SlabFile:
        if len(fds) != 1:
            raise ValueError(f"host slabs are one descriptor, got {len(fds)}")
        return SlabFile.from_fd(fds[0], slab_bytes)


class CudaBackend:
    """Slabs in the memory of one GPU."""

    def __init__(self, device: int, library: str = CUDA_DRIVER) -> None:
        """Loads the driver and retains the device's primary context. Raises: ValueError, VmmError."""
        self._device = CudaDevice(device, library)

    @property
    def granularity(self) -> int:
        return self._device.granularity

    def create(self, num_slabs: int, slab_bytes: int, name: str) -> CudaSlabs:
        ensure_fd_limit(num_slabs, f"{num_slabs} slabs of pool {name}")
        return self._device.create(num_slabs, slab_bytes)

    def adopt(self, fds: Sequence[int], slab_bytes: int) -> CudaSlabs:
        # The driver opens descriptors of its own.
        ensure_fd_limit(len(fds), f"{len(fds)} slabs of a pool")
        return self._device.import_fds(list(fds), slab_bytes)


def open_backend(kind: BackendKind, device: int = 0) -> Backend:
    """The backend of ``kind``; ``device`` counts for CUDA. Raises: VmmError, one line, without a driver."""
    return CudaBackend(device) if kind is BackendKind.CUDA else HostBackend()
