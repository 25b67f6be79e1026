"""Where slabs live: in host memory or in a GPU's, behind one interface.

Both kinds obey the same rules: a mapping is one whole slab at one whole position, nothing is mapped twice,
and a batch happens as a whole or not at all. A backend never decides which slab goes where.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from rose._vmm import CudaDevice, CudaSlabs, SlabFile, host_granularity
from rose.host_memory import available_bytes
from rose.memory.slabs.fd_limit import ensure_fd_limit

CUDA_DRIVER = "libcuda.so.1"


class BackendKind(StrEnum):
    """What a pool's memory is."""

    HOST = "host"
    CUDA = "cuda"


class SlabRange(Protocol):
    """Address space for ``num_positions`` slabs. Calls may come from any thread.

    With ``poison`` a slab is filled with 0xFF, a NaN in every float format, before it is unmapped: an engine
    that maps it without zeroing and reads it then notices. A failed batch is undone, but the poison stays.
    With ``guard`` empty positions read as zeros instead of faulting, while writes still fault: a stray read
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

    def map_many(
        self, positions: list[int], slabs: list[int], *, zero: bool = True, stream: int | None = None
    ) -> None:
        """Maps ``slabs[i]`` at ``positions[i]``, all of them or none, and fills them with zeros.

        It never waits for the device's other work. The zeros are there when the call returns; with ``stream``
        (a cudaStream_t), for the work that is put on that stream later. The host fills at once.
        Raises: ValueError for a mapped position or slab, VmmError where the system or the driver fails.
        """
        ...

    def unmap_many(self, positions: list[int], *, fence: bool = True, guard: bool = True) -> None:
        """Empties the positions, all of them or none.

        ``fence`` waits for this process's work on the device; leave it out only when that work is done.
        Without ``guard``, the positions of a guarded range fault until :meth:`guard`: others get the slabs
        sooner. Raises: ValueError where nothing is mapped, VmmError.
        """
        ...

    def guard(self) -> None:
        """Guards what :meth:`unmap_many` left without a guard, in a guarded range. Raises: VmmError."""
        ...

    def map(self, position: int, slab: int, *, zero: bool = True) -> None: ...
    def unmap(self, position: int, *, fence: bool = True) -> None: ...

    def zero(self, position: int) -> None:
        """Fills a mapped position with zeros before it returns. Raises: ValueError, VmmError."""
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
        """Returns a new descriptor, the caller's to close: the ``index``-th of ``num_fds``. Raises:
        VmmError."""
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

    @property
    def free_bytes(self) -> int:
        """Memory of this kind that nobody has taken yet."""
        ...

    def create(self, num_slabs: int, slab_bytes: int, name: str) -> Slabs:
        """Makes new memory; on the host its file is called ``name``.

        A signal handler that raises while memory is made ends the making. Raises: ValueError for a bad size,
        VmmError, ConfigError where the descriptor limit is too low.
        """
        ...

    def adopt(self, fds: Sequence[int], slab_bytes: int) -> Slabs:
        """Opens what another process exported; the caller still closes ``fds``.

        Call :func:`ensure_fd_limit` before receiving them: descriptors beyond the limit are lost.
        Raises: the errors of :meth:`create`.
        """
        ...


class HostBackend:
    """Slabs in a memfd."""

    @property
    def granularity(self) -> int:
        return host_granularity()

    @property
    def free_bytes(self) -> int:
        return available_bytes()

    def create(self, num_slabs: int, slab_bytes: int, name: str) -> SlabFile:
        return SlabFile.create(num_slabs, slab_bytes, name)

    def adopt(self, fds: Sequence[int], slab_bytes: int) -> SlabFile:
        if len(fds) != 1:
            raise ValueError(f"host slabs have one descriptor, got {len(fds)}")
        return SlabFile.from_fd(fds[0], slab_bytes)


class CudaBackend:
    """Slabs in the memory of one GPU."""

    def __init__(self, device: int, library: str = CUDA_DRIVER) -> None:
        """Loads the driver. The first range retains the device's primary context; slabs need none.

        Raises: ValueError, VmmError.
        """
        self._device = CudaDevice(device, library)

    @property
    def granularity(self) -> int:
        return self._device.granularity

    @property
    def free_bytes(self) -> int:
        return self._device.free_bytes

    def create(self, num_slabs: int, slab_bytes: int, name: str) -> CudaSlabs:
        ensure_fd_limit(num_slabs, f"{num_slabs} slabs of pool {name}")
        return self._device.create(num_slabs, slab_bytes)

    def adopt(self, fds: Sequence[int], slab_bytes: int) -> CudaSlabs:
        # The driver opens descriptors of its own.
        ensure_fd_limit(len(fds), f"{len(fds)} slabs of a pool")
        return self._device.import_fds(list(fds), slab_bytes)


def open_backend(kind: BackendKind, device: int = 0) -> Backend:
    """Opens the backend of ``kind``; ``device`` is a GPU's number. Raises: VmmError without a driver."""
    return CudaBackend(device) if kind is BackendKind.CUDA else HostBackend()
