"""Watches what rollouts cost serving, and shuts them out for a part of the time while it is too much.

Runs in the serving engine's API server. Reads the records that the engine core writes, estimates in a thread,
and writes one word on the board. Never touches the step loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from rose._shm import Words
from rose.admission.board import closed_slices, set_closed_share
from rose.admission.board_snapshot import snapshot
from rose.admission.harm import (
    CONTROL_EVERY_S,
    MEASURING_SHARE,
    Estimate,
    HarmControl,
    HarmReport,
    RequestDelay,
    SliceTime,
    StepHarm,
    estimate_harm,
)
from rose.admission.reach import is_kept, least_seconds_to_know, missed_slo, unreachable_slo
from rose.admission.slices import SLICE_S
from rose.engine.harm_records import HarmRecords
from rose.engine.http.harvest import HarvestLog
from rose.engine.settings import EngineSettings
from rose.messages import HarmEstimate, HarmHistory, HarmStatus, HarmWindow, TenantHarm
from rose.types import Deployment, GateMode

logger = logging.getLogger(__name__)

LOOKS_PER_HOURLY = 6
"""The hour is estimated once in this many looks, because that costs more, and the result changes slowly.
Until its harm is known, it is estimated at every look: then little has been recorded in it."""
HOUR_S = 3600.0
NUM_HOURS = 24
MAX_TENANTS = 16
BOUNDED_MODES = (GateMode.IDLE,)
"""The modes in which the bound is kept. The others spend slack as they were told, and harm is only
reported."""
NO_ROLLOUTS = "no rollout engine is attached"


class HarmWatch:
    """The watch of one serving engine. ``run`` is a task of the API server. Of several API servers, one
    controls."""

    def __init__(
        self,
        board: Words,
        records: HarmRecords,
        settings: EngineSettings,
        floors_s: Callable[[], tuple[float, float]],
        slot: int = 0,
    ) -> None:
        """``floors_s`` returns the best TTFT and TPOT that the engine can keep, 0 while they are unknown.
        ``slot``: the engine's slot on the board."""
        self._board = board
        self._slot = slot
        self._records = records
        self._settings = settings
        self._floors_s = floors_s
        self._control = HarmControl(settings.allow_harm)
        self._is_controlling = records.claim()
        self._mode = settings.gate_mode
        self._harvest = HarvestLog(math.ceil(HOUR_S / CONTROL_EVERY_S) + 2)
        self._recent: HarmWindow | None = None
        self._earlier: deque[HarmWindow] = deque(maxlen=NUM_HOURS - 1)
        self._hour_began_s = time.monotonic()
        self._oldest_slice_s = -math.inf
        """Nothing is known about steps before this time."""
        self._hour = self._window(HarmReport.nothing(), self._hour_began_s, -math.inf, self._hour_began_s)
        self._num_looks = 0
        self._note: str | None = NO_ROLLOUTS
        self._told: set[str] = set()

    async def run(self, mode: Callable[[], GateMode]) -> None:
        """Estimates every few seconds until it is cancelled. ``mode`` returns the gate's mode."""
        allowed = self._control.allowed
        least_s = least_seconds_to_know(allowed)
        logger.info("allow_harm=%s takes at least %.0f s of steady traffic to show", allowed, least_s)
        while True:
            try:
                await asyncio.to_thread(self.look, mode())
            except Exception:
                # Serving goes on without the measurement, and the share of closed slices stays as it is.
                logger.exception("the harm of rollouts could not be estimated")
            await asyncio.sleep(CONTROL_EVERY_S)

    def look(self, mode: GateMode) -> None:
        """Estimates once, and adjusts the share of closed slices."""
        now = time.monotonic()
        if mode is not self._mode:
            self._begin_anew(mode, now)
        elif now - self._hour_began_s >= HOUR_S:
            self._begin_hour(now)
        seen = snapshot(self._board)
        self._harvest.add(seen)
        if not seen.rollout.alive:
            # What the last rollout engine cost says nothing about the next one.
            self._control.let_in(now)
            self._note, self._recent, self._num_looks = NO_ROLLOUTS, None, 0
            self._set_closed_share(0.0)
            return
        requests, slices = self._records.requests(), self._records.slices()
        oldest_s = requests[0].at_s if self._records.has_dropped_requests and requests else -math.inf
        if self._records.has_dropped_slices and slices:
            self._oldest_slice_s = slices[0].number * SLICE_S
        report, began_s = HarmReport.nothing(), now
        for began_s in self._control.window_starts(now):
            report = _estimate_since(began_s, requests, slices)
            if report.latencies:
                break
        latest = _estimate_since(self._control.latest_start(now), requests, slices)
        recent = self._window(report, began_s, oldest_s, now)
        self._recent = recent.model_copy(update={"harvest": self._harvest.since(began_s)})
        self._adjust(report, latest, mode, now, now - began_s)
        if self._num_looks % LOOKS_PER_HOURLY == 0 or not self._hour.latencies:
            self._look_at_hour(requests, slices, oldest_s, now)
        self._num_looks += 1

    def _begin_anew(self, mode: GateMode, now: float) -> None:
        """Forgets what rollouts cost and were shut out for, which says nothing about the gate's new mode."""
        self._control.let_in(now)
        self._mode, self._recent = mode, None
        self._begin_hour(now)

    def _begin_hour(self, now: float) -> None:
        if self._hour.num_requests > 0:
            self._earlier.appendleft(self._hour)
        self._hour_began_s, self._num_looks = now, 0
        self._hour = self._window(HarmReport.nothing(), now, -math.inf, now)

    def _adjust(
        self, report: HarmReport, latest: HarmReport, mode: GateMode, now: float, seconds: float
    ) -> None:
        control, before = self._control, self._control.closed_share
        if mode in BOUNDED_MODES:
            control.update(report, now, latest, seconds)
        if control.closed_share != before:
            shown = latest if any(one.low > control.allowed for one in latest.tails) else report
            found = ", ".join(f"{name} {one}" for name, one in shown.latencies.items())
            level, what = logging.INFO, "rollouts are let in again"
            if control.closed_share > before:
                level, what = logging.WARNING, "rollouts are held back: their harm is above its bound"
            elif control.is_retreating:
                what = "rollouts are let in for more of the time"
            values = found or "unknown", control.allowed, control.closed_share
            logger.log(level, "%s harm=%s allowed=%s closed_share=%.2f", what, *values)
        self._set_closed_share(control.closed_share)

    def _set_closed_share(self, share: float) -> None:
        if self._is_controlling:
            set_closed_share(self._board, share, self._slot)

    def _look_at_hour(
        self, requests: Sequence[RequestDelay], slices: Sequence[SliceTime], oldest_s: float, now: float
    ) -> None:
        began_s = self._hour_began_s
        requests, steps = _since(requests, began_s), _steps_since(slices, began_s)
        by_tenant = defaultdict[str, list[RequestDelay]](list)
        for each in requests:
            if each.tenant:
                by_tenant[each.tenant].append(each)
        most = sorted(by_tenant, key=lambda tenant: -len(by_tenant[tenant]))[:MAX_TENANTS]
        tenants = {
            tenant: self._window(estimate_harm(by_tenant[tenant], steps), began_s, oldest_s, now)
            for tenant in most
        }
        hour = self._window(estimate_harm(requests, steps), began_s, oldest_s, now)
        self._hour = hour.model_copy(update={"harvest": self._harvest.since(began_s), "tenants": tenants})
        self._note = self._why_unknown(hour)
        self._warn_of_noise(hour)
        if (problem := self._slo_problem()) is not None:
            self._tell("slo", problem)

    def _warn_of_noise(self, window: HarmWindow) -> None:
        shown, allowed = window.shown_in_a_day, self._control.allowed
        if shown is not None and shown > allowed:
            self._tell(
                "noise",
                f"allow_harm is {allowed:g}, and a day of this traffic shows a difference of {shown:.2%} at "
                f"best: set allow_harm to at least {_rounded_up(shown):g}",
            )

    def _tell(self, what: str, text: str) -> None:
        """Logs a warning the first time."""
        if what not in self._told:
            self._told.add(what)
            logger.warning("%s", text)

    def status(self) -> HarmStatus:
        """Returns what is known now, in short: routers ask for it twice a second."""
        closed_share = closed_slices(self._board).share
        kept_ms = {
            name: slo_ms if is_kept(name, self._deployment) else None
            for name, slo_ms in (("ttft", self._settings.slo_ttft_ms), ("tpot", self._settings.slo_tpot_ms))
        }
        return HarmStatus(
            gate=self._mode,
            allow_harm=self._control.allowed,
            is_bounded=self._mode in BOUNDED_MODES,
            closed_share=closed_share,
            is_retreating=closed_share > MEASURING_SHARE,
            slo_ttft_ms=kept_ms["ttft"],
            slo_tpot_ms=kept_ms["tpot"],
            slo_problem=self._slo_problem(),
            note=self._note,
            recent=self._recent,
            hour=self._hour.model_copy(update={"tenants": {}}),
            worst_tenant=_worst_tenant(self._hour),
        )

    def history(self) -> HarmHistory:
        """Returns all that is known."""
        return HarmHistory(**dict(self.status()), hours=[self._hour, *self._earlier])

    @property
    def _deployment(self) -> Deployment:
        given = self._settings.deployment
        return given if given is not None else Deployment.COLLOCATED

    def _slo_problem(self) -> str | None:
        """Says which SLO serving can't reach at all or misses at its load, rollouts or not."""
        slo, hour = self._settings.slo(), self._hour
        if (problem := unreachable_slo(slo, self._floors_s(), self._deployment)) is not None:
            return problem
        alone_s = {
            kind: (value_ms / 1000, hour.with_rollouts_ms[name] / 1000 / (1 + hour.latencies[name].high))
            for kind, name in (("ttft", "ttft_p99"), ("tpot", "tpot_p99"))
            if (value_ms := hour.without_rollouts_ms.get(name)) is not None
        }
        return missed_slo(slo, alone_s, self._deployment)

    def _window(self, report: HarmReport, began_s: float, oldest_s: float, now: float) -> HarmWindow:
        """Returns the message for a report on the time from ``began_s`` to now. Of requests that ended before
        ``oldest_s`` nothing is known."""
        slices_s = now - max(began_s, self._oldest_slice_s)
        needed = report.closed_slices_needed(self._control.allowed)
        until_s = None
        if needed is not None:
            until_s = max(0.0, slices_s * (needed / report.num_closed_slices - 1))
        with_ms = {name: 1000 * value_s for name, value_s in report.measured_s.items()}
        return HarmWindow(
            gate=self._mode,
            ended_at_s=time.time(),
            seconds=now - began_s,
            num_requests=report.num_requests,
            requests_s=now - max(began_s, oldest_s),
            num_closed_slices=report.num_closed_slices,
            slowdown=_message(report.slowdown) if report.slowdown is not None else None,
            latencies={name: _message(one) for name, one in report.latencies.items()},
            with_rollouts_ms=with_ms,
            without_rollouts_ms={n: with_ms[n] / (1 + one.value) for n, one in report.latencies.items()},
            seconds_until_known=until_s,
            shown_in_a_day=report.shown_in_a_day(slices_s),
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


def _since(requests: Sequence[RequestDelay], since_s: float) -> list[RequestDelay]:
    return [each for each in requests if each.at_s >= since_s]


def _steps_since(slices: Sequence[SliceTime], since_s: float) -> StepHarm:
    first = since_s / SLICE_S
    return StepHarm.of([each for each in slices if each.number >= first])


def _estimate_since(
    since_s: float, requests: Sequence[RequestDelay], slices: Sequence[SliceTime]
) -> HarmReport:
    return estimate_harm(_since(requests, since_s), _steps_since(slices, since_s))


def _worst_tenant(window: HarmWindow) -> TenantHarm | None:
    """Returns the tenant whose P99 is known to differ most: the one with the highest lower bound."""
    tails = [
        TenantHarm(tenant=tenant, latency=name, harm=one)
        for tenant, each in window.tenants.items()
        for name, one in each.latencies.items()
        if name.endswith("99")
    ]
    return max(tails, key=lambda tail: tail.harm.low, default=None)


def _rounded_up(share: float) -> float:
    """Rounds up to two figures."""
    unit: float = 10 ** (math.floor(math.log10(share)) - 1)
    return math.ceil(share / unit) * unit


def _message(one: Estimate) -> HarmEstimate:
    return HarmEstimate(value=one.value, low=one.low, high=one.high)
