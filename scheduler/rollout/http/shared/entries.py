"""What an admin has set at a router, kept in a file and made equal at all peers.

Owns: the entries, each with a version, and the file that holds them. Promises: at every router, the value of
an entry with the higher version counts. A value is in the file before the caller that set it is answered. Old
removals are dropped, but never those of this router's own settings, which would come back. The file is
replaced whole by one writer at a time, and only its owner can read it, because it holds the keys of jobs.
Never does: know what an entry means (changes.py), speak to peers (peers.py), wait for the disk on the event
loop, whose streams would all stop.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rose.errors import ConfigError

logger = logging.getLogger(__name__)

Value = dict[str, Any] | bool | None
"""An entry's value; None says that the thing was removed."""
_MOST_REMOVED = 1000
"""The removals of each kind that are kept, so that a peer which was away learns of them."""


class Entry(BaseModel):
    """One thing that an admin has set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = Field(ge=1)
    writer: str
    """The router at which it was set. Between equal versions, the larger name counts."""
    value: Value = None

    @property
    def rank(self) -> tuple[int, str]:
        """The order of an entry's values: the value with the larger rank counts."""
        return (self.version, self.writer)


class Heard(BaseModel):
    """The newest weights of a run that workers have reported."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    models: list[str] | None = None
    is_adapter: bool = False
    """Whether the run is a LoRA adapter, which is a model of its own."""


class _Kept(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid")

    format: int = Field(default=1, ge=1, le=1)
    entries: dict[str, Entry] = {}
    heard: list[Heard] = []


class Entries:
    """All entries of one router. Runs on its event loop."""

    def __init__(self, writer: str, file: Path | None, in_settings: frozenset[str]) -> None:
        """Reads ``file``, if there is one. Raises: ConfigError if it can't be read.

        in_settings: the keys whose removals are never dropped.
        """
        self._in_settings = in_settings
        self._writer = writer
        self._file = file
        self._kept = _read(file) if file is not None else _Kept()
        self._digest: str | None = None
        self._num_changes = 0
        self._num_kept = -1
        """The changes that the file holds; -1 before the first writing."""
        self._writer_lock = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()

    @property
    def heard(self) -> list[Heard]:
        return self._kept.heard

    def all(self) -> dict[str, Entry]:
        return dict(self._kept.entries)

    @property
    def digest(self) -> str:
        """A hash that is equal at two routers if all their entries are. It leaves out the old removals that a
        router keeps because of its own settings."""
        if self._digest is None:
            own, old = self._kept.entries, self._old_removals()
            ranks = sorted((key, entry.rank) for key, entry in own.items() if key not in old)
            self._digest = hashlib.sha256(repr(ranks).encode()).hexdigest()
        return self._digest

    def put(self, key: str, value: Value) -> None:
        """Sets an entry, over every version that this router knows. Call save() afterwards."""
        newest = max((entry.version for entry in self._kept.entries.values()), default=0)
        self._kept.entries[key] = Entry(version=newest + 1, writer=self._writer, value=value)
        self._changed()

    def merge(self, others: Mapping[str, Entry]) -> list[str]:
        """Takes over newer entries and returns their keys. The caller has to save() afterwards."""
        own = self._kept.entries
        newer = {key: entry for key, entry in others.items() if key not in own or entry.rank > own[key].rank}
        if newer:
            own.update(newer)
            self._changed()
        return sorted(newer, key=lambda key: newer[key].rank)

    async def hear(self, heard: list[Heard]) -> None:
        """Keeps the newest weights. Raises: OSError."""
        if heard != self._kept.heard:
            self._kept.heard = heard
            self._changed()
            await self.save()

    def _changed(self) -> None:
        for key in self._old_removals() - self._in_settings:
            del self._kept.entries[key]
        self._num_changes += 1
        self._digest = None

    def _old_removals(self) -> set[str]:
        """Returns the keys of the oldest removals beyond the bound, as a platform leaves them that adds and
        removes a job for each run. They are the same at every peer."""
        removed: dict[str, list[str]] = {}
        for key, entry in self._kept.entries.items():
            if entry.value is None or entry.value is False:
                removed.setdefault(key.partition(" ")[0], []).append(key)
        return {
            key
            for keys in removed.values()
            for key in sorted(keys, key=lambda key: self._kept.entries[key].rank)[:-_MOST_REMOVED]
        }

    async def save(self) -> None:
        """Returns once the file holds everything that is set now. A caller that is cancelled leaves the
        writing to itself. Raises: OSError."""
        if self._file is None:
            return
        task = asyncio.create_task(self._write(self._file, self._num_changes))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    async def _write(self, file: Path, num_changes: int) -> None:
        """Writes the file unless a writer before has written this many changes with its own."""
        async with self._writer_lock:
            if self._num_kept >= num_changes:
                return
            num_now, text = self._num_changes, self._kept.model_dump_json(indent=1)
            await asyncio.to_thread(_replace, file, text.encode())
            self._num_kept = num_now

    async def close(self) -> None:
        """Waits for what is being written."""
        await asyncio.gather(*self._writes, return_exceptions=True)


def _replace(file: Path, data: bytes) -> None:
    """Runs in a thread: the disk may take its time."""
    beside = file.with_name(f".{file.name}.new")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(beside, file)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("state not kept error=%s", error)


def _read(file: Path) -> _Kept:
    try:
        return _Kept.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        if not file.parent.is_dir():
            raise ConfigError(f"--state {file}: there is no folder {file.parent}; make it") from None
        return _Kept()
    except OSError as error:
        raise ConfigError(f"--state {file}: can't be read ({error.strerror}); check the path") from error
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ConfigError(
            f"--state {file}: not written by rose router ({problem}); give another file, or move it away to"
            " begin without what it holds"
        ) from error
