"""How long one engine step takes: a linear cost model and its fit.

The model predicts the seconds of a step from its prefill tokens and what they attend, its decoding sequences
and their context. A prediction by which a step is admitted includes its error: the 99th percentile of
observed/predicted, and a margin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The least margin: the noise of a futex wake-up and of the interpreter.
MIN_MARGIN_S = 0.0005
# Fewer observations than this say nothing about a 99th percentile.
MIN_OBSERVATIONS = 32
# A first observation that exceeds the fit by this factor is a warm-up (lazy allocation, first-use compile).
WARM_UP_RATIO = 1.5
# Huber's constant: residuals beyond 1.345 robust standard deviations lose weight.
HUBER_SIGMAS = 1.345
FIT_ROUNDS = 12
# A refit runs between two steps of an engine, so it takes fewer rounds (one takes about 0.1 ms).
REFIT_ROUNDS = 4
PLANNED_WEIGHT = 0.1
# The base is at least this part of the quickest step, because no step is free, even if the other costs
# explain all observed times.
LEAST_BASE = 0.05

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What one step computes, in the sizes that its time depends on."""

    prefill_tokens: int
    num_decodes: int
    context_tokens: int
    """Sum of the decoding sequences' context lengths."""
    prefill_pairs: float = 0.0
    """Sum over the prefill tokens of the tokens that each attends: attended_pairs() of every chunk."""

    def observed(self, seconds: float) -> "StepObservation":
        """Returns the observation that such a step took ``seconds``."""
        return StepObservation(
            prefill_tokens=self.prefill_tokens,
            num_decodes=self.num_decodes,
            context_tokens=self.context_tokens,
            prefill_pairs=self.prefill_pairs,
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation(StepShape):
    """One measured engine step."""

    seconds: float


def attended_pairs(tokens: float, computed_tokens: float = 0) -> float:
    """Returns how many (query, key) pairs a prefill chunk has: each of its ``tokens`` attends the
    ``computed_tokens`` before the chunk, those of the chunk ahead of it, and itself."""
    return tokens * (computed_tokens + (tokens + 1) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """Predicts the seconds of one mixed step: base + prefill tokens + prefill pairs + decodes + their
    context.

    Source: ROSE §4.1 profiles T_prf(L, m) and T_dec(b) apart. Chunked prefill mixes both in one step, so one
    model has both: L tokens in chunks of m cost ceil(L / m) bases. The pairs stand for prefill's attention.
    A token that attends 28,000 others costs an 8B model of 36 layers with 32 heads twice as much.
    """

    base_s: float
    per_prefill_token_s: float
    per_decode_s: float
    per_context_token_s: float = 0.0
    per_prefill_pair_s: float = 0.0
    ratio_q99: float = 1.0
    """99th percentile of observed/predicted; never below 1."""
    margin_s: float = MIN_MARGIN_S

    def __post_init__(self) -> None:
        costs = self.costs
        if any(not math.isfinite(cost) or cost < 0 for cost in costs) or self.base_s + sum(costs) <= 0:
            raise ValueError(f"step costs must be finite, not negative and not all zero, got {costs}")
        if not (math.isfinite(self.ratio_q99) and self.ratio_q99 >= 1.0):
            raise ValueError(f"ratio_q99 must be at least 1, got {self.ratio_q99}")
        if not (math.isfinite(self.margin_s) and self.margin_s >= 0):
            raise ValueError(f"margin_s must not be negative, got {self.margin_s}")

    @property
    def costs(self) -> tuple[float, float, float, float, float]:
        """The seconds of an empty step, a prefill token, a decode, a context token and a prefill pair."""
        return (
            self.base_s,
            self.per_prefill_token_s,
            self.per_decode_s,
            self.per_context_token_s,
            self.per_prefill_pair_s,
        )

    @property
    def tokens_per_pair(self) -> float:
        """The seconds of a pair over those of a prefill token; 0 while a token's are unknown."""
        token_s = self.per_prefill_token_s
        return self.per_prefill_pair_s / token_s if token_s > 0 else 0.0

    def predict(
        self, prefill_tokens: int, num_decodes: int, context_tokens: float = 0, prefill_pairs: float = 0
    ) -> float:
        """Returns the expected seconds of a step."""
        return (
            self.base_s
            + self.per_prefill_token_s * prefill_tokens
            + self.per_decode_s * num_decodes
            + self.per_context_token_s * context_tokens
            + self.per_prefill_pair_s * prefill_pairs
        )

    def predict_step(self, step: StepShape) -> float:
        """Returns the expected seconds of this step."""
        return self.predict(step.prefill_tokens, step.num_decodes, step.context_tokens, step.prefill_pairs)

    def predict_safe(
        self, prefill_tokens: int, num_decodes: int, context_tokens: float = 0, prefill_pairs: float = 0
    ) -> float:
        """Returns the seconds that 99 of 100 such steps stay within."""
        expected_s = self.predict(prefill_tokens, num_decodes, context_tokens, prefill_pairs)
        return expected_s * self.ratio_q99 + self.margin_s

    def predict_prefill(
        self,
        tokens: int,
        chunk_tokens: int,
        num_decodes: int = 0,
        context_tokens: float = 0,
        prefill_pairs: float = 0,
    ) -> float:
        """Returns the expected seconds of prefilling ``tokens``, which attend ``prefill_pairs``, in steps of
        ``chunk_tokens``, decodes included."""
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
        num_steps = -(-tokens // chunk_tokens)
        prefill_s = self.per_prefill_token_s * tokens + self.per_prefill_pair_s * prefill_pairs
        return num_steps * self.predict(0, num_decodes, context_tokens) + prefill_s

    def tokens_within(
        self,
        budget_s: float,
        num_decodes: int,
        max_chunk: int,
        context_tokens: float = 0,
        computed_tokens: int = 0,
    ) -> int:
        """Returns the most prefill tokens after ``computed_tokens``, up to ``max_chunk``, whose safe
        prediction fits the budget."""
        room_s = (budget_s - self.predict_safe(0, num_decodes, context_tokens)) / self.ratio_q99
        if room_s < 0 or max_chunk <= 0:
            return 0
        # linear * n + square * n^2 <= room, with the pairs of n tokens
        square_s = self.per_prefill_pair_s / 2
        linear_s = self.per_prefill_token_s + self.per_prefill_pair_s * computed_tokens + square_s
        if (linear_s + square_s * max_chunk) * max_chunk <= room_s:
            return max_chunk
        return int(2 * room_s / (linear_s + math.sqrt(linear_s * linear_s + 4 * square_s * room_s)))

    def decodes_within(self, budget_s: float, max_decodes: int, context_per_decode: float = 0) -> int:
        """Returns the most decodes, up to ``max_decodes``, whose safe prediction fits the budget."""
        per_decode_s = self.per_decode_s + self.per_context_token_s * context_per_decode
        room_s = (budget_s - self.predict_safe(0, 0)) / self.ratio_q99
        return _units_within(room_s, per_decode_s, max_decodes)

    def to_json(self) -> dict[str, float]:
        """Returns the model's fields for json.dump."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "StepTimeModel":
        """Inverts to_json. Raises: ValueError for missing, unknown or impossible fields."""
        if set(fields) != set(cls.__slots__):
            raise ValueError(f"expected the fields {sorted(cls.__slots__)}, got {sorted(fields)}")
        if not all(isinstance(value, int | float) for value in fields.values()):
            raise ValueError(f"every field must be a number, got {fields}")
        return cls(**{name: float(value) for name, value in fields.items()})

    @classmethod
    def of_costs(cls, costs: Floats) -> "StepTimeModel":
        """Inverts ``costs``. The model has no error."""
        base, prefill, decode, context, pair = (float(cost) for cost in costs)
        return cls(
            base_s=base,
            per_prefill_token_s=prefill,
            per_decode_s=decode,
            per_context_token_s=context,
            per_prefill_pair_s=pair,
        )


def _units_within(room_s: float, unit_s: float, most: int) -> int:
    if room_s < 0 or most <= 0:
        return 0
    if unit_s * most <= room_s:
        return most
    return int(room_s / unit_s)


UNPROFILED = StepTimeModel(base_s=1.0, per_prefill_token_s=0.01, per_decode_s=0.01, ratio_q99=2.0)
"""Stands for a missing profile. Its steps are so slow that none fits the slack of a serving engine with work,
so the gate admits only its smallest step, and only while serving is idle."""


def fit(observations: Sequence[StepObservation]) -> StepTimeModel:
    """Fits by robust least squares on relative errors, with coefficients of 0 or more and without the
    warm-up.

    Raises: ValueError for fewer than MIN_OBSERVATIONS.
    """
    kept = drop_warm_up(observations)
    rows, seconds = _design(kept)
    return _with_errors(StepTimeModel.of_costs(_fit_robust(rows, seconds)), kept)


def refit(
    base: StepTimeModel, planned: Sequence[StepObservation], recent: Sequence[StepObservation]
) -> StepTimeModel:
    """Fits ``recent`` steps, and keeps the shape of ``planned`` ones for sizes without recent steps.

    ``base`` was fitted to the planned steps. Their times are scaled by the median ratio of the recent steps
    to ``base``, and together they weigh PLANNED_WEIGHT of the recent steps. The result has only costs; the
    caller determines its error.
    """
    recent_rows, recent_s = _design(recent)
    slowdown = float(np.median(recent_s / (recent_rows @ np.array(base.costs))))
    planned_rows, planned_s = _design(planned)
    trust = np.full(len(planned) + len(recent), PLANNED_WEIGHT * len(recent) / len(planned))
    trust[len(planned) :] = 1.0
    rows, seconds = np.vstack((planned_rows, recent_rows)), np.concatenate((planned_s * slowdown, recent_s))
    return StepTimeModel.of_costs(_fit_robust(rows, seconds, trust, rounds=REFIT_ROUNDS))


def drop_warm_up(observations: Sequence[StepObservation]) -> list[StepObservation]:
    """Drops the first observations that are much slower than a fit of all of them. Raises: ValueError."""
    if len(observations) < MIN_OBSERVATIONS:
        raise ValueError(f"need {MIN_OBSERVATIONS} observations to fit, got {len(observations)}")
    if any(o.seconds <= 0 for o in observations):
        raise ValueError("an observed step took no time; seconds must be positive")
    rows, seconds = _design(observations)
    ratios = seconds / (rows @ _fit_robust(rows, seconds))
    first = 0
    while first < len(observations) - MIN_OBSERVATIONS and ratios[first] > WARM_UP_RATIO:
        first += 1
    return list(observations[first:])


@dataclass(frozen=True, slots=True, kw_only=True)
class FitErrors:
    """The errors of a model on a set of observations."""

    num_observations: int
    error_p50_s: float
    error_p99_s: float
    ratio_p50: float
    ratio_q99: float


def fit_errors(model: StepTimeModel, observations: Sequence[StepObservation]) -> FitErrors:
    """Computes the absolute errors and the observed/predicted ratios of a model."""
    if not observations:
        raise ValueError("no observations to compare with")
    rows, seconds = _design(observations)
    predicted = rows @ np.array(model.costs)
    errors = np.abs(seconds - predicted)
    ratios = seconds / predicted
    return FitErrors(
        num_observations=len(observations),
        error_p50_s=float(np.quantile(errors, 0.5)),
        error_p99_s=float(np.quantile(errors, 0.99)),
        ratio_p50=float(np.quantile(ratios, 0.5)),
        ratio_q99=float(np.quantile(ratios, 0.99)),
    )


def _with_errors(model: StepTimeModel, observations: Sequence[StepObservation]) -> StepTimeModel:
    # The ratio covers errors that grow with the step. The margin, a typical absolute error, covers those of a
    # step of any size, such as a late wake-up.
    errors = fit_errors(model, observations)
    return replace(
        model, ratio_q99=max(1.0, errors.ratio_q99), margin_s=max(MIN_MARGIN_S, errors.error_p50_s)
    )


def _design(observations: Sequence[StepObservation]) -> tuple[Floats, Floats]:
    rows = np.array(
        [(1.0, o.prefill_tokens, o.num_decodes, o.context_tokens, o.prefill_pairs) for o in observations]
    )
    return rows.astype(np.float64), np.array([o.seconds for o in observations], dtype=np.float64)


def _fit_robust(
    rows: Floats, seconds: Floats, trust: Floats | None = None, *, rounds: int = FIT_ROUNDS
) -> Floats:
    """Solves non-negative least squares on relative errors, reweighted after Huber.

    ``trust`` is the weight of each observation; without it all weigh 1.
    """
    relative_rows = rows / seconds[:, None]
    ones = np.ones_like(seconds)
    trust = trust if trust is not None else ones
    weights = trust
    costs = np.zeros(rows.shape[1])
    for _ in range(rounds):
        scale = np.sqrt(weights)
        costs = _non_negative_lstsq(relative_rows * scale[:, None], ones * scale)
        residuals = np.abs(ones - relative_rows @ costs)
        sigma = max(1.4826 * float(np.median(residuals)), 1e-6)
        weights = trust * np.minimum(1.0, HUBER_SIGMAS * sigma / np.maximum(residuals, 1e-12))
    costs[0] = max(costs[0], LEAST_BASE * float(seconds.min()))
    return costs


def _non_negative_lstsq(rows: Floats, target: Floats) -> Floats:
    """Solves least squares, dropping the most negative coefficient until none is negative."""
    norms = np.linalg.norm(rows, axis=0)
    active = [i for i in range(rows.shape[1]) if norms[i] > 0]
    costs = np.zeros(rows.shape[1])
    while active:
        solution = np.linalg.lstsq(rows[:, active] / norms[active], target, rcond=None)[0]
        worst = int(np.argmin(solution))
        if solution[worst] >= 0:
            costs[active] = solution / norms[active]
            break
        del active[worst]
    return costs
