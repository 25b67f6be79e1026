"""One page of counters per engine, written by its scheduler and read by its HTTP routes.

Owns the page `<runtime_dir>/engine-<id>.page`. Reading it never touches the engine's step loop, so a status
is true even while the engine waits for a grant. Commands travel the other way in a few words.
"""

import mmap
import os
from enum import IntEnum
from pathlib import Path

from rose._shm import Words
from rose.errors import ConfigError

PAGE_BYTES = 4096
MILLION = 1_000_000
_URL = slice(2048, 2304)


class Field(IntEnum):
    """Index of each int64 word on the page."""

    PID = 0
    STEPS = 1
    NUM_RUNNING = 2
    NUM_WAITING = 3
    KV_SLABS_OWNED = 4
    KV_SLABS_BUDGET = 5
    KV_CACHED_BLOCKS = 6
    PRESSURE = 7
    STALLED_REQUESTS = 8
    RECLAIMED_REQUESTS = 9
    GENERATED_TOKENS = 10
    ADMITTED_STEPS = 11
    DECLINED_STEPS = 12
    BUSY_NS = 13
    CUTS = 14
    LEASES_EXPIRED = 15
    GATE_MODE = 16
    SLABS_IN_USE = 17
    IS_INACTIVE = 18
    """1 once the scheduler has obeyed WANTED_INACTIVE: no request and no slab but the pinned one is left."""
    SLABS_QUARANTINED = 19
    KV_LIVE_BLOCKS = 20
    TPOT_TARGET_US = 21
    """The TPOT target of the last gate change; 0 stands for the one that the engine was started with."""
    TTFT_FLOOR_US = 22
    """The TTFT that 99 of 100 requests stay within on the idle engine, by its step times; 0 while unknown."""
    TPOT_FLOOR_US = 23
    BOARD_SLOT = 24
    """A serving engine's place on the board of its GPU."""
    COMPUTED_TOKENS = 25
    """Prefilled tokens included."""
    # Commands, which the HTTP routes write and the scheduler reads.
    RL_STEP = 32
    WANTED_GATE_MODE = 33
    PROFILE = 34
    """A ``ProfileCommand``. The scheduler answers FIT with NONE or FAILED."""
    WANTED_INACTIVE = 35
    """1 while the engine must hold no requests and no KV."""
    WANTED_TPOT_TARGET_US = 36
    MEMORY_SHARE_PPM = 37
    """The share of the rollout budget that a rollout engine may hold, in millionths; 0 stands for all."""


class ProfileCommand(IntEnum):
    """What the HTTP routes ask of the scheduler during a profiling run."""

    NONE = 0
    RECORD = 1
    FIT = 2
    FAILED = 3
    """The scheduler's answer if there was nothing to fit or the profile could not be stored."""


class StatusPage:
    """A shared page of counters. Each word has one writer."""

    def __init__(self, path: Path, *, create: bool) -> None:
        if create:
            # The file is new: truncating the old one would kill a process that still maps it (SIGBUS).
            path.unlink(missing_ok=True)
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                allocate(fd, path, PAGE_BYTES)
            self._map = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        self.path = path
        self._words = Words(self._map)
        self._owner = create
        if create:
            self.put(Field.PID, os.getpid())
            self.put(Field.WANTED_GATE_MODE, -1)

    def get(self, field: Field) -> int:
        return self._words.load(field)

    def put(self, field: Field, value: int) -> None:
        self._words.store(field, value)

    def count(self, field: Field, increment: int = 1) -> None:
        self._words.add(field, increment)

    @property
    def memory_share(self) -> float:
        """The share of the rollout budget that a rollout engine may hold."""
        return (self.get(Field.MEMORY_SHARE_PPM) or MILLION) / MILLION

    def put_memory_share(self, share: float) -> None:
        self.put(Field.MEMORY_SHARE_PPM, max(1, round(share * MILLION)))

    @property
    def url(self) -> str:
        """Where the engine's API server answers on this host; empty until it is up."""
        return self._map[_URL].rstrip(b"\0").decode(errors="replace")

    def put_url(self, url: str) -> None:
        """Says where the API server answers. One that is too long for the page is left out."""
        room = _URL.stop - _URL.start
        if len(url.encode()) <= room:
            self._map[_URL] = url.encode().ljust(room, b"\0")

    def close(self) -> None:
        if self._owner:
            self.path.unlink(missing_ok=True)


def page_path(runtime_dir: Path, engine_id: str) -> Path:
    return runtime_dir / f"engine-{engine_id}.page"


def allocate(fd: int, path: Path, num_bytes: int) -> None:
    """Gives a new file all its pages. A write to a mapped hole would end the process once the disk is full.

    Raises: ConfigError if there is no room, with the file removed.
    """
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(
            f"ROSE_RUNTIME_DIR: {path.parent} can't take {num_bytes} bytes more ({error.strerror}); make room"
            " there, or set it to another folder"
        ) from error
