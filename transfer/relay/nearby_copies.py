"""Copies frames from one relay to a second one nearby, so that a trainer far away sends them once.

Runs beside the second relay, for stores that can't hand objects on themselves (Mooncake). Owns the set of
frames that this process has seen to. It copies frames alone, because they never change: the trainer writes
manifests, which follow their frames, and all objects that are replaced to every copy itself. A frame that is
removed while it is being copied is left over until the trainer's next repair. Never removes anything.
"""

import logging
import threading
from types import TracebackType

from rose.errors import RelayError, RoseError
from rose.transfer.format import manifest as keys
from rose.transfer.relay.protocol import Relay

logger = logging.getLogger(__name__)

_PREFIX = "rose/"
_WAIT_S = 1.0
_RETRY_S = 0.5


class NearbyCopies:
    """A context in which a thread runs step() again and again."""

    def __init__(self, source: Relay, target: Relay) -> None:
        self._source = source
        self._target = target
        self._done: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rose-copies", daemon=True)

    def step(self) -> int:
        """Copies the frames that the target lacks and returns how many there were. Raises: RelayError."""
        listed = {key for key in self._source.keys(_PREFIX) if keys.bucket_of(key) is not None}
        self._done &= listed
        missing = sorted(listed - self._done)
        if missing:
            self._done |= listed & set(self._target.keys(_PREFIX))
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

    def _run(self) -> None:
        seen: str | None = None
        is_late = False
        while not self._closing.is_set():
            try:
                seen = self._source.wait([_PREFIX], seen, _WAIT_S).seen
                self.step()
                is_late = False
            except RoseError as error:
                if not is_late:  # the other store may be gone for hours: warn once
                    logger.warning("can't copy frames from the other store for now: %s", error)
                is_late = True
                self._closing.wait(_RETRY_S)

    def __enter__(self) -> "NearbyCopies":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._thread.join()
