"""Which keys of one embedded relay were written lately, for those who wait for some of them.

Owns: the order of writes and the calls that wait. Promises: a caller that hands in what the last call
returned misses no write in between, also when the relay was started anew. Never keeps objects. Used by the
relay's event loop only.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import Sequence
from itertools import islice

_REMEMBERED = 4096
"""Writes; whoever last looked before them is told that something changed."""


class ChangeLog:
    """Positions in it are strings that mean nothing elsewhere."""

    def __init__(self) -> None:
        self._started = uuid.uuid4().hex[:12]
        self._num_writes = 0
        self._latest: deque[str] = deque(maxlen=_REMEMBERED)
        self._waiting: dict[asyncio.Future[None], tuple[str, ...]] = {}

    @property
    def position(self) -> str:
        """After the last write."""
        return f"{self._started}-{self._num_writes}"

    def note(self, key: str) -> None:
        """An object was written: wakes those who wait for it."""
        self._num_writes += 1
        self._latest.append(key)
        for future, prefixes in self._waiting.items():
            if key.startswith(prefixes) and not future.done():
                future.set_result(None)

    def close(self) -> None:
        """Wakes all who wait: the relay ends."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(
        self, prefixes: Sequence[str], seen: str, timeout_s: float
    ) -> tuple[str, list[str] | None]:
        """Returns once such keys were written since `seen`, or after timeout_s: (a position, the keys).

        Keys are None when `seen` is too old, or of another relay: then any may have been written.
        """
        wanted = tuple(prefixes)
        if self._written(wanted, seen) == []:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[future] = wanted
            try:
                await asyncio.wait([future], timeout=timeout_s)
            finally:
                del self._waiting[future]
        return self.position, self._written(wanted, seen)

    def _written(self, prefixes: tuple[str, ...], seen: str) -> list[str] | None:
        started, _, number = seen.rpartition("-")
        if started != self._started or not number.isdecimal():
            return None
        num_missed = self._num_writes - int(number)
        if not 0 <= num_missed <= len(self._latest):
            return None
        first = len(self._latest) - num_missed
        return [key for key in islice(self._latest, first, None) if key.startswith(prefixes)]
