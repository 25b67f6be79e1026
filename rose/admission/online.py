"""The step-time model of a running engine, kept true by its own steps.

Owns the sliding window of observed steps. Promises caution where knowledge is thin: a stale profile is
widened within a few steps, a missing one admits almost nothing. Never reads a clock.
"""

import math
from collections import deque
from dataclasses import replace

from rose.admission.step_time import (
    MIN_MARGIN_S,
    MIN_OBSERVATIONS,
    UNPROFILED,
    StepObservation,
    StepTimeModel,
    fit,
)

WINDOW_STEPS = 256
# Sorting the window costs tens of microseconds: once every few steps is enough, and at once after a miss.
REFRESH_STEPS = 8
# A fit on whatever steps came by, not on a planned grid, extrapolates: it is never trusted closer.
UNPLANNED_RATIO = 2.0


class OnlineStepTime:
    """A step-time model whose error bounds follow the last steps.

    With a profile: its coefficients, and ratio and margin of the window (never better than the profile's
    until the window says more than a handful of steps). Without one: UNPROFILED, so that rollouts run
    one small step at a time and only while serving is idle, until the window holds MIN_OBSERVATIONS
    steps of distinct prefill and decode sizes; then a fit of those with a doubled safety ratio.
    Runs in one thread, the engine's.
    """

    def __init__(self, profile: StepTimeModel | None, *, window_steps: int = WINDOW_STEPS) -> None:
        if window_steps < MIN_OBSERVATIONS:
            raise ValueError(f"window_steps must be at least {MIN_OBSERVATIONS}, got {window_steps}")
        self._base = profile
        self._ratio_floor = 1.0 if profile is not None else UNPLANNED_RATIO
        self._model = profile if profile is not None else UNPROFILED
        self._window: deque[StepObservation] = deque(maxlen=window_steps)
        self._ratios: deque[float] = deque(maxlen=window_steps)
        self._errors_s: deque[float] = deque(maxlen=window_steps)
        """Of the window's steps against the base model; empty without one."""
        self._steps_since_refresh = 0

    @property
    def model(self) -> StepTimeModel:
        """The model to admit with now."""
        return self._model

    @property
    def is_profiled(self) -> bool:
        """Whether predictions rest on a profile, or on enough steps of this engine."""
        return self._base is not None

    def observe(self, prefill_tokens: int, num_decodes: int, context_tokens: int, seconds: float) -> None:
        """Takes in one finished step; one slower than its safe prediction refreshes at once."""
        if seconds <= 0 or prefill_tokens + num_decodes <= 0:
            raise ValueError(f"not a step: {prefill_tokens=} {num_decodes=} {seconds=}")
        observation = StepObservation(
            prefill_tokens=prefill_tokens,
            num_decodes=num_decodes,
            context_tokens=context_tokens,
            seconds=seconds,
        )
        self._window.append(observation)
        if self._base is not None:
            self._compare(observation, self._base)
        self._steps_since_refresh += 1
        was_missed = seconds > self._model.predict_safe(prefill_tokens, num_decodes, context_tokens)
        if was_missed or self._steps_since_refresh >= REFRESH_STEPS:
            self._steps_since_refresh = 0
            self._refresh()

    def _refresh(self) -> None:
        if self._base is None and self._has_variety():
            self._base = fit(list(self._window))
            for observation in self._window:
                self._compare(observation, self._base)
        if self._base is None:
            return
        ratio_q99, margin_s = self._window_errors()
        if len(self._window) < MIN_OBSERVATIONS:
            # Too few steps to trust a better figure than the profile's; a worse one counts at once.
            ratio_q99 = max(ratio_q99, self._base.ratio_q99)
            margin_s = max(margin_s, self._base.margin_s)
        ratio_q99 = max(ratio_q99, self._ratio_floor)
        self._model = replace(self._base, ratio_q99=ratio_q99, margin_s=margin_s)

    def _has_variety(self) -> bool:
        # A cost that no pair of steps tells apart would be fitted as 0, and its steps admitted as free.
        prefills = {o.prefill_tokens for o in self._window if o.prefill_tokens > 0}
        decodes = {o.num_decodes for o in self._window if o.num_decodes > 0}
        return len(self._window) >= MIN_OBSERVATIONS and len(prefills) >= 2 and len(decodes) >= 2

    def _compare(self, o: StepObservation, base: StepTimeModel) -> None:
        predicted_s = base.predict(o.prefill_tokens, o.num_decodes, o.context_tokens)
        self._ratios.append(o.seconds / predicted_s)
        self._errors_s.append(abs(o.seconds - predicted_s))

    def _window_errors(self) -> tuple[float, float]:
        ratios, errors = sorted(self._ratios), sorted(self._errors_s)
        # The 99th percentile's rank, rounded up: the worst value of a short window.
        ratio_q99 = ratios[math.ceil(0.99 * len(ratios)) - 1]
        return max(1.0, ratio_q99), max(MIN_MARGIN_S, errors[len(errors) // 2])
