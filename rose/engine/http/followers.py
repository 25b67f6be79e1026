"""The routers that follow an engine's status, and the versions of weights and adapters that each knows.

Promises that a wait for them ends, even if one has gone or never learns of a version. Never reads the status
itself. Runs on the API server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

GONE_AFTER_INTERVALS = 2.0
"""A follower is gone after this many of its intervals without a question."""
MOST_S = 5.0
"""Longest wait for followers. No step runs during it if they wait for whole weights."""


@dataclass(frozen=True, slots=True)
class _Follower:
    knows: frozenset[str]
    asked_at_s: float
    every_s: float

    def is_gone(self, now: float) -> bool:
        return now > self.asked_at_s + GONE_AFTER_INTERVALS * self.every_s


class Followers:
    """The followers of one engine. They tag tokens with the version that they know, so they must know a
    version before its first token."""

    def __init__(self) -> None:
        self._followers: dict[str, _Follower] = {}
        self._has_asked = asyncio.Event()

    def asked(self, name: str, knows: Iterable[str], every_s: float) -> None:
        """Notes a follower's question. It asks every ``every_s`` seconds, and was last told of ``knows``."""
        now = time.monotonic()
        self._followers = {key: each for key, each in self._followers.items() if not each.is_gone(now)}
        self._followers[name] = _Follower(frozenset(knows), now, every_s)
        self._has_asked.set()

    async def until_told(self, version: str) -> None:
        """Returns when every follower that is not gone knows ``version``, or after ``MOST_S``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOST_S):
                while (patience_s := self._patience_s(version)) is not None:
                    self._has_asked.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._has_asked.wait(), patience_s)

    def _patience_s(self, version: str) -> float | None:
        """Returns the seconds until the first follower that doesn't know yet would be gone, or None if all
        know."""
        now = time.monotonic()
        behind = [
            each for each in self._followers.values() if version not in each.knows and not each.is_gone(now)
        ]
        left = [each.asked_at_s + GONE_AFTER_INTERVALS * each.every_s - now for each in behind]
        return min(left, default=None)
