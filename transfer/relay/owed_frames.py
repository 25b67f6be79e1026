"""Frames that one relay copy holds and another one is still fetching from it (nearby_copies.py).

Owns the list of those frames, their bytes until they have arrived, and the times at which to look. One
question covers all of them, and questions come at growing intervals, because each crosses the slow link.
Frames that do not arrive in time are written to the copy directly, and so are the next ones for a while.
After settle(0) the copy holds every frame, or it does not answer and stays behind until the next publish
repairs it. Never fetches anything itself.
"""

import logging
import threading
import time
from collections.abc import Iterable

from rose.errors import RelayUnreachable
from rose.transfer.relay.copies import REST_OVER_WAIT, RelayCopy
from rose.transfer.relay.url import address_of, beside_of

logger = logging.getLogger(__name__)

MOST_OWED_BYTES = 128 << 20
"""Two dense frames. The frames stay in memory in case they have to be written after all."""
_FETCH_S = 2.0
_FETCH_BYTES_PER_S = 20e6
_FIRST_LOOK_S = 0.01
_LAST_LOOK_S = 0.5
_ASK_SOURCE_S = 0.1
"""From this interval on, the source is asked for a sign of life at each look as well."""


class OwedFrames:
    """The frames that `copy` still has to fetch from `source`. Several threads may use it."""

    def __init__(self, copy: RelayCopy, source: RelayCopy) -> None:
        self.copy = copy
        self.source = source
        self._frames: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._trusted_from_s = 0.0

    @property
    def is_fetching(self) -> bool:
        """Whether frames written to the source are expected to reach the copy by themselves."""
        is_trusted = time.monotonic() >= self._trusted_from_s
        return is_trusted and not self.copy.is_resting and not self.source.is_resting

    def add(self, key: str, data: bytes) -> None:
        """Notes that the source has this frame."""
        with self._lock:
            self._frames[key] = data

    def drop(self, keys: Iterable[str]) -> None:
        """Forgets frames that have arrived or are no longer wanted."""
        with self._lock:
            for key in keys:
                self._frames.pop(key, None)

    def settle(self, max_bytes: int) -> None:
        """Returns when at most max_bytes are owed. Raises: RelayError, and RelayFull as put() does."""
        with self._settling:
            if self.copy.is_resting:
                self.drop(self._owed())
            try:
                if not self._come(max_bytes):
                    self._write()
            except RelayUnreachable:
                self.drop(self._owed())  # the copy rests from now on

    def _come(self, max_bytes: int) -> bool:
        """Waits until at most max_bytes are owed; returns False when that takes too long."""
        num_bytes = self._num_bytes()
        deadline_s = time.monotonic() + _FETCH_S + num_bytes / _FETCH_BYTES_PER_S
        pause_s = _FIRST_LOOK_S
        while num_bytes > max_bytes:
            if not self.is_fetching:
                return False
            if time.monotonic() > deadline_s:
                logger.warning("relay copy does not fetch from the one beside it: url=%s", self.copy.url)
                self._trusted_from_s = time.monotonic() + REST_OVER_WAIT * _FETCH_S
                return False
            time.sleep(pause_s)
            owed = self._owed()
            lacking = self.copy.lacking(owed)
            self.drop(key for key in owed if key not in lacking)
            num_bytes = self._num_bytes()
            if num_bytes > max_bytes and pause_s >= _ASK_SOURCE_S and not self._source_answers(owed):
                return False
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        return True

    def _source_answers(self, owed: list[str]) -> bool:
        try:
            self.source.lacking(owed[:1])
        except RelayUnreachable:
            return False
        return True

    def _write(self) -> None:
        for key in self._owed():
            with self._lock:
                data = self._frames.get(key)
            if data is not None:
                self.copy.write(key, data, [], is_replacing=False)
                self.drop([key])

    def _owed(self) -> list[str]:
        with self._lock:
            return list(self._frames)

    def _num_bytes(self) -> int:
        with self._lock:
            return sum(len(data) for data in self._frames.values())


def pair_up(copies: list[RelayCopy]) -> list[OwedFrames]:
    """Returns one OwedFrames for each copy whose URL says that it fetches frames from another of these
    copies.
    """
    by_address: dict[str | None, RelayCopy] = {address_of(copy.url): copy for copy in copies}
    found: list[OwedFrames] = []
    for copy in copies:
        source = by_address.get(beside_of(copy.url))
        if source is not None:
            found.append(OwedFrames(copy, source))
    return found
