"""The objects of one embedded relay, in the memory of its process.

Owns what is stored, how much room is left, and which keys lie in a folder. Refuses with the numbers, by
raising the HTTP error that the relay then answers. Never evicts. Only the relay's event loop uses it.
"""

from aiohttp import web


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


def _folder(key: str) -> str:
    return key[: key.rfind("/") + 1]
