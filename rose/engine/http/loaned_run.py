"""The run that the loan of an engine's GPU names, and what the subscriber beside the engine says of it.

The subscriber asks again and again, and an answer waits until the loan names another run. Promises that a
subscriber that has gone is noticed, and that a problem with a run is forgotten after a while, so that the run
is tried again. Never reads the loan itself. Runs on the API server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from rose.errors import WorkerError
from rose.messages import NOTHING_PUBLISHED

LASTING_S = 60.0
"""A run that an engine could not get is not tried again for this long."""
GONE_AFTER_S = 4.0
"""A subscriber that has not asked for this long is gone. It waits half as long for an answer."""


class LoanedRun:
    """What the subscriber of one engine is told, and says.

    ``has_subscriber``: whether the engine was started with one, which may not have asked yet.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, has_subscriber: bool = False) -> None:
        self.run: str | None = None
        self.has_subscriber = has_subscriber
        """Whether there is or has been a subscriber."""
        self._is_home_empty = False
        """Whether the run that it follows without a loan had published nothing at its last look."""
        self._clock = clock
        self._changed = asyncio.Event()
        self._heard_until_s = float("-inf")
        self._problems: dict[str, tuple[str, float]] = {}

    @property
    def is_followed(self) -> bool:
        """Whether a subscriber follows the runs that loans name."""
        return self._clock() < self._heard_until_s

    @property
    def problems(self) -> dict[str, str]:
        """The runs that could not be followed lately, with the reasons."""
        now = self._clock()
        self._problems = {run: each for run, each in self._problems.items() if now < each[1]}
        return {run: text for run, (text, _) in self._problems.items()}

    @property
    def may_have_published(self) -> bool:
        """Whether the run that the subscriber follows without a loan may have weights for the engine."""
        return self.has_subscriber and not self._is_home_empty

    def name(self, run: str | None) -> None:
        """Notes the run that the loan names now."""
        if run != self.run:
            self.run = run
            self._changed.set()

    async def asked(self, knows: str | None, problem: str | None, wait_s: float) -> str | None:
        """Returns the run once it is another than the one that the subscriber ``knows``, or after ``wait_s``.

        ``problem``: why the engine can't get the weights of the run that it knows; of the one that it follows
        without a loan, if that is None.
        """
        self.has_subscriber = True
        if knows is None:
            self._is_home_empty = problem == NOTHING_PUBLISHED
        elif problem is not None:
            self._problems[knows] = (problem, self._clock() + LASTING_S)
        self._heard_until_s = max(self._heard_until_s, self._clock() + wait_s + GONE_AFTER_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.run == knows:
                    self._changed.clear()
                    await self._changed.wait()
        self._heard_until_s = self._clock() + GONE_AFTER_S
        return self.run

    def require(self, version: str) -> None:
        """Raises: WorkerError unless a version is of the run that the loan names, if it names one."""
        run = version.rpartition("/")[0]
        if self.run not in (None, run):
            raise WorkerError(f"this GPU is lent to a job of run {self.run}, and takes no weights of {run}")

    def took(self, version: str) -> None:
        """Notes that the engine has the weights of a version."""
        self._problems.pop(version.rpartition("/")[0], None)
