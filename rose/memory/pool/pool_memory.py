"""The memory of one pool: its slabs, its ledger and its board, and the descriptors that keep them alive.

    ledger | board | slabs of shard 0 | slabs of shard 1 | ...        one descriptor per shard on the host,
                                                                      one per slab and shard on CUDA

There is one shard per rank of an engine, and slab i exists in each of them. Every process of an engine
holds all descriptors, so that any one of them can hand the pool to a new daemon, but opens its own rank's
shard alone. An observer holds the ledger and the board.

Memory is made only where there is room for all of it. Received descriptors are checked: they fit together,
and none of the files can shrink under a mapping.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rose._shm import Words
from rose.errors import ConfigError, PoolError, VmmError
from rose.memory.ledger.ledger import Ledger
from rose.memory.ledger.ledger_words import ledger_bytes
from rose.memory.slabs.backend import Backend, BackendKind, Slabs, open_backend

BOARD_BYTES = 4096
MIN_SLABS = 2
"""Every engine keeps one slab mapped for good, and at least two engines share a pool."""
MAX_SLABS = (1 << 24) - 1
"""The ledger's policy word has 24 bits for a number of slabs."""
KEPT_BY_OTHERS = 1
"""The slabs that an engine can't have, at least: another one keeps the slab of its padding block for good."""
MAX_SHARDS = 16
"""The most GPUs that one host has. The daemon's limit on clients follows from it."""

_NUM_PAGES_FDS = 2  # ledger and board, before the slabs'


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """What a pool consists of."""

    num_slabs: int
    slab_bytes: int
    headroom_slabs: int
    num_shards: int = 1
    """The number of ranks of each of its engines; each has ``num_slabs`` slabs of its own."""
    backend: BackendKind = BackendKind.HOST

    def __str__(self) -> str:
        return (
            f"--num-slabs {self.num_slabs} --slab-bytes {self.slab_bytes} "
            f"--headroom-slabs {self.headroom_slabs} --num-shards {self.num_shards} --backend {self.backend}"
        )

    @property
    def fds_per_shard(self) -> int:
        return self.num_slabs if self.backend is BackendKind.CUDA else 1

    @property
    def num_fds(self) -> int:
        """The number of descriptors that the pool's memory takes in each of its engines' processes."""
        return _NUM_PAGES_FDS + self.num_shards * self.fds_per_shard

    def check(self) -> None:
        """Raises: ConfigError for sizes that no pool can have."""
        if not MIN_SLABS <= self.num_slabs <= MAX_SLABS:
            raise ConfigError(
                f"--num-slabs {self.num_slabs}: must be {MIN_SLABS}..{MAX_SLABS}; a serving and a rollout "
                f"engine keep one slab each for good"
            )
        if self.slab_bytes < 1:
            raise ConfigError(f"--slab-bytes {self.slab_bytes}: must be positive")
        if not 0 <= self.headroom_slabs < self.num_slabs:
            raise ConfigError(
                f"--headroom-slabs {self.headroom_slabs}: must be 0..{self.num_slabs - 1} with --num-slabs "
                f"{self.num_slabs}"
            )
        if not 1 <= self.num_shards <= MAX_SHARDS:
            raise ConfigError(
                f"--num-shards {self.num_shards}: must be 1..{MAX_SHARDS}, the ranks of each of its engines: "
                f"the product of their tensor-, pipeline- and prefill-context-parallel sizes"
            )

    def check_ranks(self, pool: str, num_ranks: int) -> None:
        """Raises: ConfigError unless each rank of an engine has one shard."""
        if num_ranks != self.num_shards:
            raise ConfigError(
                f"an engine of {num_ranks} ranks (the product of its tensor-, pipeline- and "
                f"prefill-context-parallel sizes) needs a pool of {num_ranks} shards, pool {pool} has "
                f"{self.num_shards}: start the engine with {self.num_shards} ranks, or the pool with "
                f"--num-shards {num_ranks}"
            )


class PoolMemory:
    """One process's hold on a pool's memory."""

    def __init__(self, fds: Sequence[int], created: Sequence[Slabs] = ()) -> None:
        """Takes received descriptors over, even when it fails.

        ``created`` is what the descriptors were exported from; it is held as long as they are.
        Raises: PoolError if the descriptors don't fit together.
        """
        self._fds = list(fds)
        self._created = list(created)
        try:
            self._open()
        except (OSError, ValueError) as error:
            self.close()
            raise PoolError(f"the pool's memory can't be used: {error}") from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, name: str, size: PoolSize) -> "PoolMemory":
        """Makes new memory with every slab free; on CUDA, shard i is on the i-th GPU that this process sees.

        Raises: ConfigError for bad sizes, or where there is no room for them; PoolError.
        """
        size.check()
        backends = [_open_backend(name, size, shard) for shard in range(size.num_shards)]
        with ExitStack() as undo:
            shards, fds = [], []
            for shard, backend in enumerate(backends):
                slabs = _make_slabs(name, size, shard, backend)
                shards.append(slabs)
                for index in range(slabs.num_fds):
                    fds.append(slabs.export(index))
                    undo.callback(os.close, fds[-1])
                    os.set_inheritable(fds[-1], False)
            ledger_fd = _make_pages(f"rose-ledger-{name}", ledger_bytes(size.num_slabs))
            undo.callback(os.close, ledger_fd)
            board_fd = _make_pages(f"rose-board-{name}", BOARD_BYTES)
            undo.pop_all()
        Ledger.create(
            mmap.mmap(ledger_fd, os.fstat(ledger_fd).st_size),
            num_slabs=size.num_slabs,
            slab_bytes=size.slab_bytes,
            headroom_slabs=size.headroom_slabs,
            num_shards=size.num_shards,
            backend=size.backend,
        )
        return cls([ledger_fd, board_fd, *fds], shards)

    @property
    def fds(self) -> tuple[int, ...]:
        """All descriptors, to be sent; they stay ours."""
        return tuple(self._fds)

    @property
    def page_fds(self) -> tuple[int, ...]:
        """The descriptors of ledger and board, for an observer; they stay ours."""
        return tuple(self._fds[:_NUM_PAGES_FDS])

    @property
    def size(self) -> PoolSize:
        ledger = self.ledger
        return PoolSize(
            num_slabs=ledger.num_slabs,
            slab_bytes=ledger.slab_bytes,
            headroom_slabs=ledger.headroom_slabs,
            num_shards=ledger.num_shards,
            backend=ledger.backend,
        )

    def open_slabs(self, shard: int, device: int) -> Slabs:
        """Opens one shard's slabs; ``device`` is the GPU that they are on, as this process counts.

        Raises: PoolError; ConfigError where the descriptor limit is too low.
        """
        size = self.size
        first = _NUM_PAGES_FDS + shard * size.fds_per_shard
        fds = self._fds[first : first + size.fds_per_shard]
        if not 0 <= shard < size.num_shards or not fds:
            raise ValueError(f"no slabs of shard {shard} of {size.num_shards} among {len(self._fds)} files")
        try:
            slabs = open_backend(size.backend, device).adopt(fds, size.slab_bytes)
        except ValueError as error:
            raise PoolError(f"the pool's memory can't be used: {error}") from error
        if slabs.num_slabs != size.num_slabs:
            raise PoolError(f"shard {shard} has {slabs.num_slabs} slabs, but the ledger has {size.num_slabs}")
        return slabs

    def files(self) -> list[tuple[int, int]]:
        """Device and inode behind each descriptor. They are equal in all processes of a pool."""
        return [(status.st_dev, status.st_ino) for status in map(os.fstat, self._fds)]

    def close(self) -> None:
        """Drops the descriptors. Mapped slabs stay mapped."""
        self._created.clear()
        while self._fds:
            os.close(self._fds.pop())

    def _open(self) -> None:
        if len(self._fds) < _NUM_PAGES_FDS:
            raise PoolError(f"a pool's memory has {_NUM_PAGES_FDS} descriptors or more, got {len(self._fds)}")
        ledger_fd, board_fd, *slab_fds = self._fds
        self.ledger = Ledger(_map_pages(ledger_fd))
        self.board_words = Words(_map_pages(board_fd))
        if slab_fds and len(self._fds) != self.size.num_fds:
            raise PoolError(
                f"a pool of {self.size} has {self.size.num_fds} descriptors, got {len(self._fds)}"
            )


def _open_backend(name: str, size: PoolSize, shard: int) -> Backend:
    """Raises: ConfigError for more shards than GPUs, or more memory than is free; PoolError."""
    try:
        backend = open_backend(size.backend, device=shard)
        free_bytes = backend.free_bytes
    except ValueError as error:
        raise ConfigError(f"pool {name}: {error}") from error
    except VmmError as error:
        raise PoolError(f"pool {name}: {error}") from error
    is_host = size.backend is BackendKind.HOST
    num_shards = size.num_shards if is_host else 1  # on the host, all shards share one memory
    needed_bytes = num_shards * size.num_slabs * size.slab_bytes
    if needed_bytes > free_bytes:
        where = "this host" if is_host else f"GPU {shard}"
        most = free_bytes // (num_shards * size.slab_bytes)
        raise ConfigError(
            f"pool {name}: {size} needs {_gb(needed_bytes)} on {where}, where {_gb(free_bytes)} are free: "
            f"use --num-slabs {most} or fewer, or smaller slabs"
        )
    return backend


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _make_slabs(name: str, size: PoolSize, shard: int, backend: Backend) -> Slabs:
    """Raises: ConfigError for a bad slab size; PoolError."""
    try:
        return backend.create(size.num_slabs, size.slab_bytes, f"rose-slabs-{name}-{shard}")
    except ValueError as error:
        raise ConfigError(f"pool {name}: {error}") from error
    except VmmError as error:
        raise PoolError(f"pool {name}: {error}") from error


def _make_pages(name: str, num_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def _map_pages(fd: int) -> mmap.mmap:
    """Raises: ValueError, OSError for anything but shared pages that can't shrink."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError(f"descriptor {fd} may shrink: a pool's pages are sealed against that")
    return mmap.mmap(fd, os.fstat(fd).st_size)
