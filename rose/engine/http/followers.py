"""Who follows an engine's status, and what each knows of its weights.

Owns the routers that ask for the status under a name of their own. Promises that a wait for them ends: who
has gone, or never learns, is not waited for. Never reads the status itself. Runs on the API server's event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

GONE_AFTER_INTERVALS = 2.0
"""Who has missed one question may only be late; who has missed two is gone."""
MOST_S = 5.0
"""No step runs while followers are waited for."""


@dataclass(frozen=True, slots=True)
class _Follower:
    knows: str | None
    asked_at_s: float
    every_s: float

    def is_gone(self, now: float) -> bool:
        return now > self.asked_at_s + GONE_AFTER_INTERVALS * self.every_s


class Followers:
    """Routers tag tokens with the version that they know of, so they have to know before the first token."""

    def __init__(self) -> None:
        self._followers: dict[str, _Follower] = {}
        self._has_asked = asyncio.Event()

    def asked(self, name: str, knows: str | None, every_s: float) -> None:
        """A follower asked, as it does every so often; ``knows``: the version that it was told last."""
        now = time.monotonic()
        self._followers = {key: each for key, each in self._followers.items() if not each.is_gone(now)}
        self._followers[name] = _Follower(knows, now, every_s)
        self._has_asked.set()

    async def until_told(self, version: str) -> None:
        """Returns when every follower that is not gone knows of ``version``, or after ``MOST_S``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOST_S):
                while (patience_s := self._patience_s(version)) is not None:
                    self._has_asked.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._has_asked.wait(), patience_s)

    def _patience_s(self, version: str) -> float | None:
        """Until the first of those who don't know yet would be gone; None where there is none."""
        now = time.monotonic()
        behind = [
            each for each in self._followers.values() if each.knows != version and not each.is_gone(now)
        ]
        left = [each.asked_at_s + GONE_AFTER_INTERVALS * each.every_s - now for each in behind]
        return min(left, default=None)
