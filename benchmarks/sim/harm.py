"""A serving engine beside rollouts with a known harm: the same traffic with rollouts, and without them.

The shipped books, slices, estimate and control run in it; the engine itself is a few lines. Simulated.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from rose.admission.deadlines import ServingDeadlines
from rose.admission.gate import GateSettings
from rose.admission.harm import (
    CONTROL_EVERY_S,
    MEASURING_SHARE,
    HarmControl,
    HarmReport,
    RequestDelay,
    SliceTime,
    StepHarm,
    estimate_harm,
)
from rose.admission.slices import SLICE_S, ClosedSlices, slice_number
from rose.admission.step_time import StepTimeModel
from rose.types import SLO, GateMode

COSTS = StepTimeModel(
    base_s=0.0066, per_prefill_token_s=3.1e-5, per_decode_s=4.1e-5, ratio_q99=1.0, margin_s=0.0
)
"""An 8B model's serving steps on an H800 (benchmarks/sim/twin/pairs.py)."""
ROLLOUT_STEP_S = 0.010
STEP_NOISE = 0.08
CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonTraffic:
    """Poisson arrivals of requests with log-normal prompts and outputs."""

    rate_rps: float = 2.0
    median_prompt: float = 700.0
    median_output: float = 60.0
    spread: float = 0.8

    def requests(self, horizon_s: float, rng: random.Random) -> Iterator[tuple[float, int, int]]:
        """(arrival, prompt tokens, output tokens) of each request."""
        now = rng.expovariate(self.rate_rps)
        while now < horizon_s:
            lengths = (
                m * rng.lognormvariate(0, self.spread) for m in (self.median_prompt, self.median_output)
            )
            prompt, output = (max(2, round(length)) for length in lengths)
            yield now, min(prompt, 8192), min(output, 1000)
            now += rng.expovariate(self.rate_rps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """What one run left: the engine's records, and what its control did."""

    requests: list[RequestDelay]
    slices: list[SliceTime]
    closed_shares: list[tuple[float, float]]
    """(time, share) after each look of the control."""


@dataclass(slots=True)
class _Request:
    prompt_left: int
    output_left: int


class HarmedServing:
    """One run. ``slowdown`` of steps while rollouts are let in begins at ``slow_from_s``."""

    def __init__(
        self,
        traffic: PoissonTraffic,
        *,
        horizon_s: float,
        seed: int,
        has_rollouts: bool,
        slowdown: float = 0.0,
        slow_from_s: float = 0.0,
        allowed: float | None = None,
    ) -> None:
        self._arrivals = list(traffic.requests(horizon_s, random.Random(seed)))
        self._noise = random.Random(seed + 1)
        self._phase = random.Random(seed + 2)
        # Every run sees other slices closed.
        self._shift_s = SLICE_S * random.Random(seed).randrange(10**6)
        self._has_rollouts = has_rollouts
        self._slowdown, self._slow_from_s = slowdown, slow_from_s
        self._control = HarmControl(allowed) if allowed is not None else None
        gate = GateSettings(slo=SLO(ttft_s=0.5, tpot_s=0.15), mode=GateMode.IDLE)
        self._books = ServingDeadlines(gate, chunk_tokens=CHUNK_TOKENS)
        self._slices: dict[int, SliceTime] = {}
        self._running: dict[str, _Request] = {}
        self._shares: list[tuple[float, float]] = []
        self._share = MEASURING_SHARE if has_rollouts else 0.0
        self._looked_s = 0.0

    def run(self) -> ServedRun:
        now, next_arrival = 0.0, 0
        while next_arrival < len(self._arrivals) or self._running:
            if not self._running:
                now = max(now, self._arrivals[next_arrival][0])
                waited_s = self._wait_for_rollout(now)
                now += waited_s
                self._books.waited(waited_s, now)
            while next_arrival < len(self._arrivals) and self._arrivals[next_arrival][0] <= now:
                at_s, prompt, output = self._arrivals[next_arrival]
                name = str(next_arrival)
                self._books.arrived(name, at_s, prompt)
                self._running[name] = _Request(prompt, output)
                next_arrival += 1
            now = self._step(now)
            self._look(now)
        return ServedRun(
            requests=self._books.ended, slices=list(self._slices.values()), closed_shares=self._shares
        )

    def _wait_for_rollout(self, now: float) -> float:
        """A rollout step that was running when a request came to the idle engine is waited for."""
        if not self._has_rollouts or self._is_closed(now):
            return 0.0
        return self._phase.uniform(0, ROLLOUT_STEP_S)

    def _is_closed(self, now: float) -> bool:
        return ClosedSlices(share=self._share).is_closed(now + self._shift_s)

    def _step(self, now: float) -> float:
        decodes = [name for name, one in self._running.items() if one.prompt_left == 0]
        prefill, finished_prompts = 0, []
        for name, one in self._running.items():
            part = min(one.prompt_left, CHUNK_TOKENS - len(decodes) - prefill)
            if part > 0:
                one.prompt_left -= part
                prefill += part
                if one.prompt_left == 0:
                    finished_prompts.append(name)
        predicted_s = COSTS.predict(prefill, len(decodes), 0)
        is_closed = self._is_closed(now)
        seconds = predicted_s * self._noise.lognormvariate(0, STEP_NOISE)
        if self._has_rollouts and not is_closed and now >= self._slow_from_s:
            seconds *= 1 + self._slowdown
        end_s = now + seconds
        produced = [*decodes, *finished_prompts]
        self._books.produced(produced, end_s)
        for name in produced:
            self._running[name].output_left -= 1
        ended = [name for name in produced if self._running[name].output_left <= 0]
        self._books.finished(ended)
        for name in ended:
            del self._running[name]
        number = slice_number(now + self._shift_s)
        sofar = self._slices.get(number, SliceTime(number=number, is_closed=is_closed))
        self._slices[number] = sofar.and_step(seconds, predicted_s, COSTS.base_s)
        return end_s

    def _look(self, now: float) -> None:
        if self._control is None or not self._has_rollouts or now - self._looked_s < CONTROL_EVERY_S:
            return
        self._looked_s = now
        report, since_s = HarmReport.nothing(), now
        for since_s in self._control.window_starts(now):
            report = self._report(since_s)
            if report.latencies:
                break
        latest = self._report(self._control.latest_start(now))
        self._control.update(report, now, latest, now - since_s)
        self._share = self._control.closed_share
        self._shares.append((now, self._share))

    def _report(self, since_s: float) -> HarmReport:
        first = slice_number(since_s + self._shift_s)
        recent = [one for one in self._books.ended[-4000:] if one.at_s >= since_s]
        slices = [one for number, one in list(self._slices.items())[-4000:] if number >= first]
        return estimate_harm(recent, StepHarm.of(slices))
