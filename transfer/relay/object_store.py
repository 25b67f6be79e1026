"""The objects of one embedded relay, in its process's memory.

Owns: what is stored, how much room is left, which keys lie in a folder.
Promises: refuses with the numbers, as the HTTP error that the relay then answers. Never evicts. Used by the
relay's event loop only.
"""

from aiohttp import web


class ObjectStore:
    """capacity_bytes: of all objects together."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.objects: dict[str, bytes] = {}
        self.used_bytes = 0
        self._folders: dict[str, set[str]] = {}

    def write(self, key: str, data: bytes, *, replace: bool) -> None:
        """Raises: web.HTTPConflict when the key exists, web.HTTPInsufficientStorage when full."""
        old = self.objects.get(key)
        if old is not None and not replace:
            raise web.HTTPConflict(text=f"{key} exists and is immutable")
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
        """The keys that start with `prefix`, in order; looks only into folders that can hold them.

        Followers list a version's folder several times a second, among those of a hundred others.
        """
        return sorted(
            name
            for folder, names in self._folders.items()
            if folder.startswith(prefix) or prefix.startswith(folder)
            for name in names
            if name.startswith(prefix)
        )

    def check_integrity(self) -> None:
        """Raises: AssertionError when the byte count or the folders are off."""
        total = sum(len(data) for data in self.objects.values())
        assert total == self.used_bytes <= self.capacity_bytes, (total, self.used_bytes)
        assert self.names("") == sorted(self.objects)


def _folder(key: str) -> str:
    return key[: key.rfind("/") + 1]
