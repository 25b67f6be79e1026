"""The memory of one pool: its slabs, its ledger and its board, behind the descriptors that keep them alive.

Owns the order of the descriptors and the checks of received ones. Promises that a PoolMemory is whole: what
was received fits together, and none of it can shrink under a mapping. Never talks to anybody.

Every process of the pool holds all of it, so any one of them can hand it to a new daemon.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from rose._shm import Words
from rose._vmm import SlabFile
from rose.errors import ConfigError, PoolError
from rose.memory.ledger import Ledger, ledger_bytes

BOARD_BYTES = 4096
MIN_SLABS = 2
"""Every engine maps one slab for good, and a pool is there to be shared by two."""

_NUM_PAGES_FDS = 2  # ledger and board, before the slabs'


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """What a pool consists of."""

    num_slabs: int
    slab_bytes: int
    headroom_slabs: int

    def __str__(self) -> str:
        return (
            f"--num-slabs {self.num_slabs} --slab-bytes {self.slab_bytes} "
            f"--headroom-slabs {self.headroom_slabs}"
        )

    @property
    def num_fds(self) -> int:
        """Descriptors that the pool's memory takes, in each of its processes."""
        return _NUM_PAGES_FDS + 1

    def check(self) -> None:
        """Raises: ConfigError for sizes that no pool can have."""
        if self.num_slabs < MIN_SLABS:
            raise ConfigError(
                f"--num-slabs {self.num_slabs}: a serving and a rollout engine hold one slab each for good; "
                f"use {MIN_SLABS} or more"
            )
        if not 0 <= self.headroom_slabs < self.num_slabs:
            raise ConfigError(
                f"--headroom-slabs {self.headroom_slabs}: must be 0..{self.num_slabs - 1} with --num-slabs "
                f"{self.num_slabs}"
            )


class PoolMemory:
    """One process's hold on a pool's memory."""

    def __init__(self, fds: Sequence[int]) -> None:
        """Takes received descriptors over, also when it fails. Raises: PoolError where they don't fit."""
        self._fds = list(fds)
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
        """Makes new memory, every slab free. Raises: ConfigError for bad sizes, PoolError."""
        size.check()
        try:
            slabs = SlabFile.create(size.num_slabs, size.slab_bytes, f"rose-slabs-{name}")
        except ValueError as error:
            raise ConfigError(f"pool {name}: {error}") from error
        except OSError as error:
            raise PoolError(f"pool {name}: {error.strerror}") from error
        ledger_fd, board_fd = (
            _make_pages(f"rose-ledger-{name}", ledger_bytes(size.num_slabs)),
            _make_pages(f"rose-board-{name}", BOARD_BYTES),
        )
        Ledger.create(
            mmap.mmap(ledger_fd, os.fstat(ledger_fd).st_size),
            num_slabs=size.num_slabs,
            slab_bytes=size.slab_bytes,
            headroom_slabs=size.headroom_slabs,
        )
        return cls([ledger_fd, board_fd, fcntl.fcntl(slabs.fileno(), fcntl.F_DUPFD_CLOEXEC, 0)])

    @property
    def fds(self) -> tuple[int, ...]:
        """To be sent; they stay ours."""
        return tuple(self._fds)

    @property
    def size(self) -> PoolSize:
        return PoolSize(
            num_slabs=self.ledger.num_slabs,
            slab_bytes=self.ledger.slab_bytes,
            headroom_slabs=self.ledger.headroom_slabs,
        )

    def files(self) -> list[tuple[int, int]]:
        """Device and inode behind each descriptor: equal for two processes of the same pool."""
        return [(status.st_dev, status.st_ino) for status in map(os.fstat, self._fds)]

    def close(self) -> None:
        """Drops the descriptors. What is mapped stays."""
        while self._fds:
            os.close(self._fds.pop())

    def _open(self) -> None:
        if len(self._fds) <= _NUM_PAGES_FDS:
            raise PoolError(
                f"a pool's memory has more than {_NUM_PAGES_FDS} descriptors, got {len(self._fds)}"
            )
        ledger_fd, board_fd, *slab_fds = self._fds
        self.ledger = Ledger(_map_pages(ledger_fd))
        self.board_words = Words(_map_pages(board_fd))
        (slabs_fd,) = slab_fds
        self.slab_file = SlabFile.from_fd(slabs_fd, self.ledger.slab_bytes)
        if self.slab_file.num_slabs != self.ledger.num_slabs:
            raise PoolError(
                f"the slab file has {self.slab_file.num_slabs} slabs, the ledger {self.ledger.num_slabs}"
            )


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
