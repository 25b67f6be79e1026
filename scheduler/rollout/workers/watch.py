"""The stall clock of whatever runs on a worker.

Owns: Watch.
Promises: a watch that runs out raises TimeoutError, at once if the worker is lost or has unsuitable weights.
While the worker's weights change, only the deadline counts. A delay of the router itself is not taken for
silence of a worker.
Never does: know what a stall means for the worker (turn/rerouting.py).
"""

import asyncio
import math
from typing import Any, Protocol, Self

from rose.types import WeightVersion

HELD_UP_S = 0.25
"""A timer that fires this late shows that the router was delayed and has not read what the worker sent."""


class Watched(Protocol):
    """A worker that tells its watches when it is lost or its weights change."""

    watches: "set[Watch]"

    @property
    def is_updating(self) -> bool: ...

    @property
    def weight_version(self) -> WeightVersion | None: ...


class Watch:
    """A stall clock. It runs out at once when the worker is lost.

    `async with watch:` encloses the work and raises TimeoutError. `watch.allow(seconds)` notes progress; it
    is cheap, as it seldom sets a new timer.
    """

    def __init__(
        self,
        worker: Watched,
        deadline: float = math.inf,
        version: WeightVersion | None = None,
        run_id: str | None = None,
        first_token_s: float = 0.0,
    ) -> None:
        """`deadline`: the monotonic time at which the watch runs out, whatever is allowed.

        The watch also runs out when the worker has other weights than `version`, or weights of another run
        than `run_id`; None: it accepts any. `first_token_s`: what a first token gets here, if that is more
        than usual.
        """
        self.worker = worker
        self.deadline = deadline
        self.is_lost = False
        self.is_outdated = False
        self._version = version
        self._run_id = run_id
        self._first_token_s = first_token_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._until = math.inf
        self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self.worker.watches.add(self)
        self._check_version()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self.worker.watches.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(*exc_info)

    def allow(self, seconds: float) -> None:
        """Lets the watch run out in `seconds` from now, whatever was allowed before."""
        self._is_paused = False
        if self.worker.is_updating:
            seconds = math.inf
        self._set(min(self._loop.time() + seconds, self.deadline))

    def pause(self) -> None:
        """Stops the clock until the next allow(); only the deadline counts."""
        self._is_paused = True
        self._set(self.deadline)

    def _set(self, until: float) -> None:
        self._until = until
        if self._timer is not None and self._timer.when() > until:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and until < math.inf:
            self._timer = self._loop.call_at(until, self._look)

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self._loop.time() >= self.deadline

    def _look(self) -> None:
        self._timer = None
        now, held_up_s = self._loop.time(), self._loop.time() - self._until
        if held_up_s > HELD_UP_S and now < self.deadline:
            self._set(min(now + held_up_s, self.deadline))
        elif held_up_s >= 0:
            self._run_out()
        elif self._until < math.inf:
            self._timer = self._loop.call_at(self._until, self._look)

    def worker_updating(self) -> None:
        """Stops the clock while the worker's steps are held back for new weights."""
        self._set(self.deadline)
        self._check_version()

    def worker_updated(self, seconds: float) -> None:
        """Starts the clock again; the worker has `seconds` to make its next token, which may take as long as
        the first one."""
        if not self._is_paused:
            self.allow(max(seconds, self._first_token_s))
        self._check_version()

    def _check_version(self) -> None:
        version = self.worker.weight_version
        is_other = self._version is not None and version != self._version
        if is_other or (self._run_id is not None and version is not None and version.run_id != self._run_id):
            self.is_outdated = True
            self._run_out()

    def worker_lost(self) -> None:
        self.is_lost = True
        self._run_out()

    def _run_out(self) -> None:
        if not self._timeout.expired():  # what runs under it may not have been told of that yet
            self._timeout.reschedule(self._loop.time())
