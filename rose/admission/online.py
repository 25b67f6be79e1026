"""The step-time model of a running engine, which follows the engine's own steps.

It keeps a sliding window of observed steps, and is cautious where it knows little. The bounds of a stale
profile are widened within a few steps, and its costs are fitted again within a few hundred. Without a profile
almost nothing is admitted.

The first step of each size may be cold: it compiles kernels and touches memory for the first time. It widens
the bound like any other step, but only until another step of its size has been seen, or for MIN_OBSERVATIONS
steps.

A window of slow steps may keep an engine from all further ones, if serving never idles. So its caller has it
forget them when they are old.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rose.admission.step_time import (
    MIN_MARGIN_S,
    MIN_OBSERVATIONS,
    UNPROFILED,
    StepObservation,
    StepShape,
    StepTimeModel,
    fit,
    refit,
)

WINDOW_STEPS = 256
# Sorting the window takes tens of microseconds. It is done every few steps, and at once after a miss.
REFRESH_STEPS = 8
# A refit takes less than 1 ms of the engine's time.
REFIT_STEPS = 256
# A fit on an engine's own traffic, and not on a planned grid of steps, extrapolates. It keeps at least this
# ratio.
UNPLANNED_RATIO = 2.0


@dataclass(slots=True, kw_only=True)
class _Seen:
    """A step of the window, and how far the base model was from it."""

    step: StepObservation
    counts_until: float = math.inf
    """The number of the step from which on this one no longer counts for the errors."""
    ratio: float = 1.0
    error_s: float = 0.0

    def compare(self, base: StepTimeModel) -> None:
        predicted_s = base.predict_step(self.step)
        self.ratio = self.step.seconds / predicted_s
        self.error_s = abs(self.step.seconds - predicted_s)


class OnlineStepTime:
    """A step-time model that follows the last steps. One thread uses it, the engine's.

    With a profile, it starts from the profile's costs. Its ratio and margin are the window's, but not better
    than the profile's until the window has MIN_OBSERVATIONS steps. Every REFIT_STEPS the costs are fitted
    again, to the window and the profile's own steps.

    Without a profile it is UNPROFILED, so rollouts run one small step at a time and only while serving is
    idle. This lasts until the window has MIN_OBSERVATIONS steps of different prefill and decode sizes, not
    counting the first step of a size that has had others. From then on it is a fit of these steps with a
    safety ratio of at least UNPLANNED_RATIO, and they take the place of the profile's steps.
    """

    def __init__(
        self,
        profile: StepTimeModel | None,
        planned: Sequence[StepObservation] = (),
        *,
        window_steps: int = WINDOW_STEPS,
    ) -> None:
        """``planned`` are the steps that the profile was fitted to; without them the profile's costs stay."""
        if window_steps < MIN_OBSERVATIONS:
            raise ValueError(f"window_steps must be at least {MIN_OBSERVATIONS}, got {window_steps}")
        self._base = profile
        self._planned = planned
        self._planned_base = profile
        """The model that the planned steps made."""
        self._ratio_floor = 1.0 if profile is not None else UNPLANNED_RATIO
        self._model = profile if profile is not None else UNPROFILED
        self._observed = self._model
        self._window: deque[_Seen] = deque(maxlen=window_steps)
        self._firsts: dict[tuple[int, int], _Seen] = {}
        """The first step of each size."""
        self._num_observed = 0
        self._steps_since_refresh = 0
        self._steps_since_refit = 0
        if profile is not None and planned:
            refit(profile, planned, planned)  # the first call loads the solver, which takes tens of ms

    @property
    def model(self) -> StepTimeModel:
        """The model by which steps are admitted now."""
        return self._model

    @property
    def observed(self) -> StepTimeModel:
        """The model without UNPLANNED_RATIO, the caution for a fit on an engine's own traffic."""
        return self._observed

    @property
    def is_profiled(self) -> bool:
        """Whether predictions rest on a profile, or on enough steps of this engine."""
        return self._base is not None

    def observe(self, step: StepObservation) -> None:
        """Adds one finished step. A step that is slower than its safe prediction refreshes the model at
        once."""
        if step.seconds <= 0 or step.prefill_tokens + step.num_decodes <= 0:
            raise ValueError(f"a step needs tokens and time, got {step}")
        self._num_observed += 1
        seen = _Seen(step=step)
        if (first := self._firsts.setdefault(_size_of(step), seen)) is seen:
            seen.counts_until = self._num_observed + MIN_OBSERVATIONS
        else:
            first.counts_until = 0
        self._window.append(seen)
        if self._base is not None:
            seen.compare(self._base)
        self._steps_since_refresh += 1
        self._steps_since_refit += 1
        model = self._model
        was_missed = step.seconds > model.predict_step(step) * model.ratio_q99 + model.margin_s
        if was_missed or self._steps_since_refresh >= REFRESH_STEPS:
            self._steps_since_refresh = 0
            self._refresh()

    def forget(self) -> None:
        """Returns to the profile, or without one to the first fit, as if no step had been seen since.

        It is for an engine that is admitted no more. Its last steps may have met stalls or a slow machine,
        and only another step could show that these are over.
        """
        if self._planned_base is None or not self._window:
            return
        self._window.clear()
        self._rebase(self._planned_base)
        self._steps_since_refresh = 0
        self._adopt(self._planned_base)

    def _refresh(self) -> None:
        counted = [seen for seen in self._window if seen.counts_until > self._num_observed]
        # The only step of a size is used even if it was cold, because it says more than no step.
        steps = [seen.step for seen in self._window if seen.counts_until > 0]
        if self._base is None and _has_variety(steps):
            self._planned, self._planned_base = steps, fit(steps)
            self._rebase(self._planned_base)
        elif self._base and self._planned_base and self._planned and self._steps_since_refit >= REFIT_STEPS:
            bounds = {"ratio_q99": self._base.ratio_q99, "margin_s": self._base.margin_s}
            fitted = refit(self._planned_base, self._planned, [seen.step for seen in self._window])
            self._rebase(replace(fitted, **bounds))
        if self._base is None:
            return
        ratio_q99, margin_s = _errors_of(counted)
        if len(counted) < MIN_OBSERVATIONS:
            # With few steps a better figure than the profile's is not trusted. A worse one counts at once.
            ratio_q99 = max(ratio_q99, self._base.ratio_q99)
            margin_s = max(margin_s, self._base.margin_s)
        self._adopt(replace(self._base, ratio_q99=ratio_q99, margin_s=margin_s))

    def _adopt(self, observed: StepTimeModel) -> None:
        self._observed = observed
        self._model = replace(observed, ratio_q99=max(observed.ratio_q99, self._ratio_floor))

    def _rebase(self, base: StepTimeModel) -> None:
        self._base = base
        self._steps_since_refit = 0
        for seen in self._window:
            seen.compare(base)


def _has_variety(steps: Sequence[StepObservation]) -> bool:
    # A cost that the steps do not show would be fitted as 0, and would then be admitted as free.
    prefills = {o.prefill_tokens for o in steps if o.prefill_tokens > 0}
    decodes = {o.num_decodes for o in steps if o.num_decodes > 0}
    if len(steps) < MIN_OBSERVATIONS or min(len(prefills), len(decodes)) < 2:
        return False
    # If every step is full, decodes and prefill tokens have a constant sum, and the base can't be told apart.
    sizes = np.array([(1, o.prefill_tokens, o.num_decodes) for o in steps])
    return int(np.linalg.matrix_rank(sizes)) == 3


def _size_of(step: StepShape) -> tuple[int, int]:
    """Returns the size of a step, in powers of two: kernels are chosen and compiled for such ranges."""
    return step.prefill_tokens.bit_length(), step.num_decodes.bit_length()


def _errors_of(counted: Sequence[_Seen]) -> tuple[float, float]:
    ratios, errors = sorted(seen.ratio for seen in counted), sorted(seen.error_s for seen in counted)
    # The 99th percentile's rank, rounded up: the worst value of a short window.
    ratio_q99 = ratios[math.ceil(0.99 * len(ratios)) - 1]
    return max(1.0, ratio_q99), max(MIN_MARGIN_S, errors[len(errors) // 2])
