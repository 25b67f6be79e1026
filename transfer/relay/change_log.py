"""Which keys of one embedded relay were written lately, for callers that wait for some of them.

Owns the order of writes and the calls that wait. A caller that passes in the position that the last call
returned misses no write in between, even when the relay was restarted. Never keeps objects. Only the relay's
event loop uses it.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import Sequence
from itertools import islice

_REMEMBERED = 4096
"""The number of writes kept. A caller whose last look is older is told only that something changed."""


class ChangeLog:
    """The latest writes in order. A position in the log is a string that means nothing to any other relay."""

    def __init__(self) -> None:
        self._started = uuid.uuid4().hex[:12]
        self._num_writes = 0
        self._latest: deque[str] = deque(maxlen=_REMEMBERED)
        self._waiting: dict[asyncio.Future[None], tuple[str, ...]] = {}

    @property
    def position(self) -> str:
        """The position after the last write."""
        return f"{self._started}-{self._num_writes}"

    def note(self, key: str) -> None:
        """Records that an object was written, and wakes the callers that wait for it."""
        self._num_writes += 1
        self._latest.append(key)
        for future, prefixes in self._waiting.items():
            if key.startswith(prefixes) and not future.done():
                future.set_result(None)

    def close(self) -> None:
        """Wakes every waiting caller, because the relay is stopping."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(
        self, prefixes: Sequence[str], seen: str, timeout_s: float
    ) -> tuple[str, list[str] | None]:
        """Returns once such keys have been written since `seen`, or after timeout_s: (the position, the
        keys).

        The keys are None when `seen` is too old or comes from another relay: then any object may have been
        written.
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
