class SlabFile:
    """A memfd of equal slabs that can never shrink."""

    @staticmethod
    def create(num_slabs: int, slab_bytes: int, name: str = "rose-slabs") -> SlabFile:
        """Make a new, empty file. `slab_bytes`: a power of two, at least a page.

        Raises: ValueError, OSError.
        """
    @staticmethod
    def from_fd(fd: int, slab_bytes: int) -> SlabFile:
        """Open a received descriptor, which is duplicated. Raises: ValueError, OSError."""
    def fileno(self) -> int: ...
    @property
    def num_slabs(self) -> int: ...
    @property
    def slab_bytes(self) -> int: ...

class Range:
    """An address range of slab positions: the host twin of a CUDA VMM reservation.

    Supports the buffer protocol over its whole length (`torch.frombuffer(range_, dtype=torch.int8)`);
    touching an unmapped position is a segmentation fault. Alive while a tensor over it is. A forked child
    sees none of the mappings.
    """

    def __init__(self, slabs: SlabFile, num_positions: int) -> None: ...
    def map(self, position: int, slab: int) -> None:
        """Back a free position with a whole slab, zeroed. Raises: ValueError, OSError."""
    def unmap(self, position: int) -> None:
        """Back to a guard. Raises: ValueError where nothing is mapped."""
    def map_many(self, positions: list[int], slabs: list[int]) -> None:
        """All or nothing: checked before the first mapping, undone after a failed system call."""
    def unmap_many(self, positions: list[int]) -> None: ...
    def zero(self, position: int) -> None: ...
    def slab_at(self, position: int) -> int | None: ...
    def mapped(self) -> list[tuple[int, int]]:
        """(position, slab) pairs, ascending."""
    @property
    def address(self) -> int: ...
    @property
    def num_positions(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def slab_bytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
