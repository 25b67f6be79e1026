"""Watches what rollouts cost serving, and shuts them out for a part of the time while it is too much.

Runs in the serving engine's API server: it reads the records that the engine core leaves, estimates in a
thread, and writes one word on the board. It never touches the step loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from rose._shm import Words
from rose.admission.board import closed_slices, set_closed_share, snapshot
from rose.admission.harm import (
    MEASURING_SHARE,
    Estimate,
    HarmControl,
    HarmReport,
    RequestDelay,
    SliceTime,
    estimate_harm,
)
from rose.admission.slices import SLICE_S
from rose.engine.harm_records import HarmRecords
from rose.messages import HarmEstimate, HarmStatus, HarmWindow
from rose.types import GateMode

logger = logging.getLogger(__name__)

EVERY_S = 10.0
LOOKS_PER_HOURLY = 6
"""The hour's estimate costs more, and changes slowly."""
HOUR_S = 3600.0
NUM_HOURS = 24
MAX_TENANTS = 16
BOUNDED_MODES = (GateMode.IDLE,)
"""The others spend what they were told to, and the harm is only told."""
NO_ROLLOUTS = "no rollout engine is attached"


class HarmWatch:
    """One serving engine's. ``run`` is a task of the API server; one of several API servers controls."""

    def __init__(self, board: Words, records: HarmRecords, allowed: float) -> None:
        self._board = board
        self._records = records
        self._control = HarmControl(allowed)
        self._is_controlling = records.claim()
        self._recent: HarmWindow | None = None
        self._hour: HarmWindow | None = None
        self._tenants: dict[str, HarmWindow] = {}
        self._earlier: deque[HarmWindow] = deque(maxlen=NUM_HOURS - 1)
        self._hour_began_s = time.monotonic()
        self._num_looks = 0
        self._mode: GateMode | None = None
        self._note: str | None = NO_ROLLOUTS

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
        if mode is not self._mode:
            if self._mode is not None:
                self._begin_anew(now)
            self._mode = mode
        if not snapshot(self._board).rollout.alive:
            self._note = NO_ROLLOUTS
            self._set_closed_share(0.0)
            return
        requests, slices = self._records.requests(), self._records.slices()
        report, began_s = HarmReport.nothing(), now
        for began_s in self._control.window_starts(now):
            report = _estimate(requests, slices, began_s)
            if report.latencies:
                break
        self._recent = self._window(report, now - began_s)
        self._adjust(report, mode, now)
        if self._num_looks % LOOKS_PER_HOURLY == 0:
            self._look_at_hour(requests, slices, now)
        self._num_looks += 1

    def _begin_anew(self, now: float) -> None:
        """Forgets what rollouts cost and were shut out for, which says nothing about the gate's new mode."""
        self._control.let_in(now)
        self._end_hour(now)
        self._hour = None

    def _end_hour(self, now: float) -> None:
        if self._hour is not None:
            self._earlier.appendleft(self._hour)
        self._hour_began_s = now

    def _adjust(self, report: HarmReport, mode: GateMode, now: float) -> None:
        control, before = self._control, self._control.closed_share
        if mode in BOUNDED_MODES:
            control.update(report, now)
        if control.closed_share != before:
            found = ", ".join(f"{name} {one}" for name, one in report.latencies.items())
            logger.info("harm=%s allowed=%s closed_share=%.2f", found, control.allowed, control.closed_share)
        self._set_closed_share(control.closed_share)

    def _set_closed_share(self, share: float) -> None:
        if self._is_controlling:
            set_closed_share(self._board, share)

    def _look_at_hour(
        self, requests: Sequence[RequestDelay], slices: Sequence[SliceTime], now: float
    ) -> None:
        if now - self._hour_began_s >= HOUR_S:
            self._end_hour(now)
        report = _estimate(requests, slices, self._hour_began_s)
        self._hour = self._window(report, now - self._hour_began_s)
        self._note = self._why_unknown(self._hour)
        self._tenants = {
            tenant: self._window(
                _estimate([each for each in requests if each.tenant == tenant], slices, self._hour_began_s),
                now - self._hour_began_s,
            )
            for tenant, _ in Counter(each.tenant for each in requests if each.tenant).most_common(MAX_TENANTS)
        }

    def status(self) -> HarmStatus:
        """What is known now."""
        closed_share = closed_slices(self._board).share
        return HarmStatus(
            allow_harm=self._control.allowed,
            closed_share=closed_share,
            is_retreating=closed_share > MEASURING_SHARE,
            note=self._note,
            recent=self._recent,
            hours=[*([self._hour] if self._hour is not None else []), *self._earlier],
            tenants=self._tenants,
        )

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


def _estimate(requests: Sequence[RequestDelay], slices: Sequence[SliceTime], since_s: float) -> HarmReport:
    first = since_s / SLICE_S
    return estimate_harm(
        [each for each in requests if each.at_s >= since_s], [each for each in slices if each.number >= first]
    )


def _message(one: Estimate) -> HarmEstimate:
    return HarmEstimate(value=one.value, low=one.low, high=one.high)
