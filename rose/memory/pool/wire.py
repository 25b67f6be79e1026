"""The messages between the pool daemon and its clients: one JSON line each way on a Unix stream socket.

The pool's descriptors (rose/memory/pool/pool_memory.py) travel with the answer to a new client, and with the
hello of a client that comes back. An observer gets those of ledger and board alone:

    new client   ClientHello                        ->    Welcome + descriptors, or Refusal
    comes back   ClientHello(slot) + descriptors    ->    Welcome, or Refusal
    leaves       Bye                                ->    (closed)

A malformed line raises PoolError.
"""

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rose.errors import ConfigError, PoolError
from rose.types import Role

PROTOCOL_VERSION = 3
_MAX_SOCKET_PATH_BYTES = 107  # sun_path holds 108 with its end mark


class Kind(StrEnum):
    """The part of an engine that a client is."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    OBSERVER = "observer"
    """Reads the ledger. It belongs to no engine and owns nothing."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_line(self) -> bytes:
        """Returns the message as one line of JSON."""
        return self.model_dump_json().encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Raises: PoolError for anything but this message."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise PoolError(f"bad {cls.__name__} line: {where}: {first['msg']}") from error


class ClientHello(_Message):
    """A client's first line, also when it comes back after the connection broke."""

    protocol: int = PROTOCOL_VERSION
    role: Role = Role.SERVING
    engine_id: Annotated[str, Field(max_length=128)]
    kind: Kind
    rank: Annotated[int, Field(ge=0)] = 0
    world_size: Annotated[int, Field(ge=1, le=0xFFFF)] = 1
    pid: int
    slot: int = 0
    """Where the client is attached already; 0 for a new client."""

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Reads a hello, its version first. Raises: PoolError for anything else."""
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        # Another version has other fields, and an error about those would say nothing.
        version = content.get("protocol", PROTOCOL_VERSION) if isinstance(content, dict) else PROTOCOL_VERSION
        if version != PROTOCOL_VERSION:
            raise PoolError(
                f"client speaks pool protocol {version}, the pool's daemon {PROTOCOL_VERSION}: run the "
                f"same rose version on both sides"
            )
        return super().from_line(line)


class Bye(_Message):
    """A client's last line: its part of the engine has no slab mapped any more."""

    bye: bool = True


class Welcome(_Message):
    """The daemon's answer. Descriptors travel with it to a new client."""

    slot: int
    num_fds: int
    daemon_pid: int


class Refusal(_Message):
    """The daemon's answer when it refuses the client."""

    refused: str
    is_transient: bool = False
    """True if the same hello may succeed soon: the engine's predecessor has not ended yet, or the daemon has
    just started and looks for its predecessor's memory."""


def read_answer(line: bytes) -> Welcome | Refusal:
    """Reads the daemon's line. Raises: PoolError."""
    try:
        is_refusal = "refused" in json.loads(line)
    except (ValueError, TypeError) as error:
        raise PoolError(f"the pool daemon answered {line[:80]!r}") from error
    return Refusal.from_line(line) if is_refusal else Welcome.from_line(line)


def socket_path(runtime_dir: Path, name: str) -> Path:
    """Returns where a pool's daemon listens. Raises: ConfigError for a bad name or too long a path."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ConfigError(
            f"pool name {name!r}: use up to 64 letters, digits, '_', '.' and '-', and begin with a letter "
            f"or digit"
        )
    path = runtime_dir / f"pool-{name}.sock"
    num_bytes = len(bytes(path))
    if num_bytes > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"{path}: the path has {num_bytes} bytes, but a socket's path may have {_MAX_SOCKET_PATH_BYTES}; "
            f"set ROSE_RUNTIME_DIR to a shorter folder"
        )
    return path
