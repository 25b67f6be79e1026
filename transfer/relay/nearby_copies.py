"""Copies frames from one relay to a second one nearby, so that a trainer far away sends them once.

Runs beside the second relay, for stores that can't hand objects on themselves (Mooncake). Owns the set of
frames that this process has handled. It copies only frames, because they never change. The trainer itself
writes to every copy the manifests, which follow their frames, and all objects that are replaced. A frame that
is removed while it is being copied stays until the trainer's next repair. Never removes anything.
"""

from collections.abc import Sequence

from rose.errors import RelayError
from rose.transfer.format import manifest as keys
from rose.transfer.relay.beside import PREFIX, BesideRelay
from rose.transfer.relay.protocol import Relay


class NearbyCopies(BesideRelay):
    """A context in which frames are copied from `source` to `target`."""

    def __init__(self, source: Relay, target: Relay) -> None:
        super().__init__(source, "copies")
        self._source = source
        self._target = target
        self._done: set[str] = set()

    def step(self, written: Sequence[str] | None = None) -> int:
        """Copies the frames that the target lacks and returns how many there were. Raises: RelayError."""
        listed = {key for key in self._source.keys(PREFIX) if keys.bucket_of(key) is not None}
        self._done &= listed
        missing = sorted(listed - self._done)
        if missing:
            self._done |= listed & set(self._target.keys(PREFIX))
        num_copied = 0
        for key in missing:
            if key not in self._done:
                num_copied += self._copy(key)
        return num_copied

    def _copy(self, key: str) -> bool:
        data = self._source.get(key)
        if data is None:
            return False  # it was removed meanwhile
        try:
            self._target.put(key, data)
        except RelayError:
            # Either the trainer gave up waiting and wrote the frame, or there is no room for it yet.
            if self._target.get(key) != data:
                raise
        self._done.add(key)
        return True
