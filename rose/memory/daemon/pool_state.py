"""What a pool's daemon leaves for its successor: `pool-NAME.state`, beside the socket.

A reader finds a whole file or none, because the file is replaced and never rewritten. The pool's memory
itself is held by the processes that the file names.
"""

import json
import os
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from rose.errors import PoolError
from rose.memory.pool.pool_memory import PoolSize
from rose.memory.pool.processes import find_process
from rose.memory.pool.wire import ClientHello
from rose.memory.slabs.backend import BackendKind

STATE_VERSION = 2


class MemberState(BaseModel):
    """One attached scheduler or worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hello: ClientHello
    """It has the slot, and the pid as the daemon sees it."""
    started: int
    """The process's start_ticks (rose.memory.pool.processes), because pids are used again."""


class PoolState(BaseModel):
    """A pool, the identity of its memory, and the processes that hold it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = STATE_VERSION
    num_slabs: int
    slab_bytes: int
    headroom_slabs: int
    num_shards: int
    backend: BackendKind
    files: list[tuple[int, int]]
    """Device and inode of each descriptor of the memory, in order."""
    members: list[MemberState]
    broken_slots: list[int]
    """Engines that have lost a process: no other joins them any more."""

    @classmethod
    def of(
        cls,
        size: PoolSize,
        *,
        files: list[tuple[int, int]],
        members: list[MemberState],
        broken_slots: list[int],
    ) -> Self:
        """Makes the state of a pool of this size."""
        return cls(
            num_slabs=size.num_slabs,
            slab_bytes=size.slab_bytes,
            headroom_slabs=size.headroom_slabs,
            num_shards=size.num_shards,
            backend=size.backend,
            files=files,
            members=members,
            broken_slots=broken_slots,
        )

    @property
    def size(self) -> PoolSize:
        return PoolSize(
            num_slabs=self.num_slabs,
            slab_bytes=self.slab_bytes,
            headroom_slabs=self.headroom_slabs,
            num_shards=self.num_shards,
            backend=self.backend,
        )


def read_state(path: Path) -> PoolState | None:
    """Reads the file; None if there is none. Raises: PoolError if it can't be understood."""
    fix = f"stop the engines of this pool, then remove {path}"
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise PoolError(f"{path}: can't be read ({error}); {fix}") from error
    try:
        content = json.loads(text)
        version = content.get("version") if isinstance(content, dict) else None
        if version != STATE_VERSION:
            raise PoolError(f"{path}: has version {version}, but this rose knows {STATE_VERSION}; {fix}")
        return PoolState.model_validate(content)
    except ValueError as error:
        raise PoolError(f"{path}: not a pool's state ({str(error).splitlines()[0]}); {fix}") from error


def living_size(path: Path) -> PoolSize | None:
    """Returns the size of the pool that a former daemon's engines still hold; None if none of them lives.

    Raises: PoolError if the file can't be understood.
    """
    state = read_state(path)
    if state is None:
        return None
    for member in state.members:
        if (pidfd := find_process(member.hello.pid, member.started)) is not None:
            os.close(pidfd)
            return state.size
    return None


def write_state(path: Path, state: PoolState) -> None:
    """Replaces the file. Raises: OSError."""
    new = path.with_suffix(".state.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(state.model_dump_json())
    new.replace(path)
