"""The objects of one embedded relay, in the memory of its process.

Owns what is stored, how much room is left, and which keys lie in a folder. Refuses with the numbers, by
raising the HTTP error that the relay then answers. Never evicts. Only the relay's event loop uses it;
StoreClient is for other threads of the process.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from aiohttp import web

from rose.errors import RelayError, RelayFull
from rose.transfer.relay.change_log import ChangeLog
from rose.transfer.relay.protocol import Relay, RelayChanges

Answer = TypeVar("Answer")


class ObjectStore:
    """The stored objects. capacity_bytes: the limit on the sum of their sizes."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.objects: dict[str, bytes] = {}
        self.used_bytes = 0
        self._folders: dict[str, set[str]] = {}

    def write(self, key: str, data: bytes, *, replace: bool) -> None:
        """Raises: web.HTTPConflict when the key exists, web.HTTPInsufficientStorage when full."""
        old = self.objects.get(key)
        if old is not None and not replace:
            raise web.HTTPConflict(text=f"{key} exists already and is immutable")
        grow = len(data) - (len(old) if old is not None else 0)
        self.require_room(key, grow)
        self.objects[key] = data
        self._folders.setdefault(_folder(key), set()).add(key)
        self.used_bytes += grow

    def require_room(self, key: str, num_bytes: int) -> None:
        """Raises: web.HTTPInsufficientStorage with the numbers."""
        free = self.capacity_bytes - self.used_bytes
        if num_bytes > free:
            raise web.HTTPInsufficientStorage(
                text=f"{key}: need {num_bytes} bytes, {free} free of {self.capacity_bytes}"
            )

    def remove(self, key: str) -> None:
        """Removes the object if it is there."""
        if key not in self.objects:
            return
        self.used_bytes -= len(self.objects.pop(key))
        names = self._folders[_folder(key)]
        names.remove(key)
        if not names:
            del self._folders[_folder(key)]

    def names(self, prefix: str) -> list[str]:
        """Returns the keys that start with `prefix`, in order. Looks only into folders that can hold such
        keys.

        Followers list one version's folder several times a second, among the folders of a hundred other
        versions.
        """
        return sorted(
            name
            for folder, names in self._folders.items()
            if folder.startswith(prefix) or prefix.startswith(folder)
            for name in names
            if name.startswith(prefix)
        )

    def check_integrity(self) -> None:
        """Raises: AssertionError when the byte count or the folders do not match the objects."""
        total = sum(len(data) for data in self.objects.values())
        assert total == self.used_bytes <= self.capacity_bytes, (total, self.used_bytes)
        assert self.names("") == sorted(self.objects)


class StoreClient(Relay):
    """The store as a relay for a thread of its own process; see rose.transfer.relay.protocol.Relay.

    Each call is run by the event loop. An object is handed over as it lies in memory.
    """

    def __init__(self, store: ObjectStore, log: ChangeLog, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._log = log
        self._loop = loop

    def put(self, key: str, data: bytes) -> None:
        self._write(key, data, replace=False)

    def upsert(self, key: str, data: bytes) -> None:
        self._write(key, data, replace=True)

    def get(self, key: str) -> bytes | None:
        return self._call(lambda: self._store.objects.get(key))

    def remove(self, keys: Iterable[str]) -> None:
        def remove() -> None:
            for name in names:
                self._store.remove(name)

        names = list(keys)
        self._call(remove)

    def keys(self, prefix: str) -> list[str]:
        return self._call(lambda: self._store.names(prefix))

    def wait(self, prefixes: Sequence[str], seen: str | None, timeout_s: float) -> RelayChanges:
        if seen is None:
            return RelayChanges(seen=self._call(lambda: self._log.position), keys=None)
        waiting = asyncio.run_coroutine_threadsafe(self._log.wait(prefixes, seen, timeout_s), self._loop)
        position, keys = waiting.result()
        return RelayChanges(seen=position, keys=keys)

    def close(self) -> None:
        """There is nothing to close: the store belongs to the event loop."""

    def _write(self, key: str, data: bytes, *, replace: bool) -> None:
        def write() -> None:
            self._store.write(key, data, replace=replace)
            self._log.note(key)

        try:
            self._call(write)
        except web.HTTPInsufficientStorage as error:
            raise RelayFull(error.text) from error
        except web.HTTPConflict as error:
            raise RelayError(error.text) from error

    def _call(self, work: Callable[[], Answer]) -> Answer:
        async def run() -> Answer:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()


def _folder(key: str) -> str:
    return key[: key.rfind("/") + 1]
