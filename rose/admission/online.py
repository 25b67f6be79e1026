"""The step-time model of a running engine, kept true by its own steps.

It keeps a sliding window of observed steps, and is cautious where it knows little: a stale profile is widened
within a few steps, and without a profile almost nothing is admitted.
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
# Sorting the window takes tens of microseconds. It is done every few steps, and at once after a miss.
REFRESH_STEPS = 8
# A fit on the steps that happened to come, not on a planned grid, extrapolates: it keeps at least this ratio.
UNPLANNED_RATIO = 2.0


class OnlineStepTime:
    """A step-time model whose error bounds follow the last steps. One thread uses it, the engine's.

    With a profile it has the profile's coefficients, and the window's ratio and margin, which are not better
    than the profile's until the window has more than a few steps. Without one it is UNPROFILED, so that
    rollouts run one small step at a time and only while serving is idle, until the window has
    MIN_OBSERVATIONS steps of different prefill and decode sizes. From then on it is a fit of those with a
    doubled safety ratio.
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
        """The errors of the window's steps against the base model; empty without one."""
        self._steps_since_refresh = 0

    @property
    def model(self) -> StepTimeModel:
        """The model that steps are admitted by now."""
        return self._model

    @property
    def is_profiled(self) -> bool:
        """Whether predictions rest on a profile, or on enough steps of this engine."""
        return self._base is not None

    def observe(self, prefill_tokens: int, num_decodes: int, context_tokens: int, seconds: float) -> None:
        """Adds one finished step. A step that is slower than its safe prediction refreshes the model at
        once."""
        if seconds <= 0 or prefill_tokens + num_decodes <= 0:
            raise ValueError(f"a step needs tokens and time, got {prefill_tokens=} {num_decodes=} {seconds=}")
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
            # With so few steps a better figure than the profile's is not trusted; a worse one counts at once.
            ratio_q99 = max(ratio_q99, self._base.ratio_q99)
            margin_s = max(margin_s, self._base.margin_s)
        ratio_q99 = max(ratio_q99, self._ratio_floor)
        self._model = replace(self._base, ratio_q99=ratio_q99, margin_s=margin_s)

    def _has_variety(self) -> bool:
        # A cost that no two steps tell apart would be fitted as 0, and its steps would be admitted as free.
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
