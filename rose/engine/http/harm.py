"""Watches what rollouts cost serving, and shuts them out for a part of the time while it is too much.

Runs in the serving engine's API server: it reads the records that the engine core leaves, estimates in a
thread, and writes one word on the board. It never touches the step loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from rose._shm import Words
from rose.admission.board import set_closed_share, snapshot
from rose.admission.harm import Estimate, HarmControl, HarmReport, estimate_harm
from rose.admission.slices import SLICE_S
from rose.engine.harm_records import HarmRecords
from rose.messages import HarmEstimate, HarmStatus, HarmWindow
from rose.types import GateMode

logger = logging.getLogger(__name__)

EVERY_S = 10.0
HOUR_S = 3600.0
NUM_HOURS = 24
BOUNDED_MODES = (GateMode.IDLE,)
"""The others spend what they were told to, and the harm is only told."""


class HarmWatch:
    """One serving engine's. ``run`` is a task of the API server's loop."""

    def __init__(self, board: Words, records: HarmRecords, allowed: float) -> None:
        self._board = board
        self._records = records
        self._control = HarmControl(allowed)
        self._minute: HarmWindow | None = None
        self._hour: HarmWindow | None = None
        self._earlier: deque[HarmWindow] = deque(maxlen=NUM_HOURS - 1)
        self._hour_began_s = time.monotonic()
        self._note: str | None = "no rollout engine is attached"

    async def run(self, mode: Callable[[], GateMode]) -> None:
        """Looks every few seconds until it is cancelled. ``mode`` tells the gate's."""
        while True:
            try:
                await asyncio.to_thread(self.look, mode())
            except Exception:
                # Serving goes on without the measurement. Rollouts stay as they are.
                logger.exception("the harm of rollouts could not be estimated")
            await asyncio.sleep(EVERY_S)

    def look(self, mode: GateMode) -> None:
        """Estimates once, and adjusts the share of closed slices."""
        now = time.monotonic()
        if not snapshot(self._board).rollout.alive:
            self._note = "no rollout engine is attached"
            set_closed_share(self._board, 0.0)
            return
        began_s = self._control.window_start(now)
        recent = self._report(began_s, now)
        was = self._control.closed_share
        if mode in BOUNDED_MODES:
            self._control.update(recent, now)
        if self._control.closed_share != was:
            logger.info(
                "harm=%s allowed=%.1f%% closed_share=%.0f%%",
                recent.worst,
                100 * self._control.allowed,
                100 * self._control.closed_share,
            )
        set_closed_share(self._board, self._control.closed_share)
        self._minute = self._window(recent, now - began_s)
        if now - self._hour_began_s >= HOUR_S and self._hour is not None:
            self._earlier.appendleft(self._hour)
            self._hour_began_s = now
        seconds = now - self._hour_began_s
        self._hour = self._window(self._report(self._hour_began_s, now), seconds)
        self._note = self._why_unknown(self._hour)

    def status(self) -> HarmStatus:
        """What is known now."""
        return HarmStatus(
            allow_harm=self._control.allowed,
            closed_share=self._control.closed_share,
            is_retreating=self._control.is_retreating,
            note=self._note,
            minute=self._minute,
            hours=[*([self._hour] if self._hour is not None else []), *self._earlier],
        )

    def _report(self, since_s: float, now: float) -> HarmReport:
        requests = [each for each in self._records.requests() if since_s <= each.at_s <= now]
        first, last = since_s / SLICE_S, now / SLICE_S
        slices = [each for each in self._records.slices() if first <= each.number <= last]
        return estimate_harm(requests, slices)

    def _window(self, report: HarmReport, seconds: float) -> HarmWindow:
        needed = report.closed_slices_needed(self._control.allowed)
        until_s = None
        if needed is not None:
            until_s = max(0.0, seconds * (needed / report.num_closed_slices - 1))
        return HarmWindow(
            seconds=seconds,
            num_requests=report.num_requests,
            num_closed_slices=report.num_closed_slices,
            slowdown=_message(report.slowdown) if report.slowdown is not None else None,
            latencies={name: _message(one) for name, one in report.latencies.items()},
            seconds_until_known=until_s,
        )

    def _why_unknown(self, window: HarmWindow) -> str | None:
        if window.latencies:
            return None
        if window.slowdown is None:
            return (
                f"{window.num_closed_slices} slices without rollouts had steps of a known cost; "
                "a profile (rose profile) and more traffic are needed"
            )
        return f"{window.num_requests} requests ended; more are needed"


def _message(one: Estimate) -> HarmEstimate:
    return HarmEstimate(value=one.value, low=one.low, high=one.high)
