"""How fast a worker is, as learned from the turns that ran on it.

Owns: SpeedEstimate, a running fit of the two parts of a decode step and of the prefill rate; ModelSpeed, the
same for all workers of a model; WorkerSpeed, a worker's estimate, which gives way to its model's while the
worker is idle.
Promises: memory is bounded and recent turns count most. Times are those of a whole GPU (wall time x share),
so that an estimate made under load also holds without load. No estimate keeps a worker idle for ever.
Never does: I/O, read a clock.
"""

import math
from dataclasses import dataclass, field

from rose.scheduler.rollout.placing.views import Speed

_FORGET = 0.98
"""The weight of an observation relative to the next one, so that about the last 50 count."""
_FORGET_OF_MODEL = 0.998
"""The same for all workers of a model together: one worker's stall must not decide what is typical."""
_MIN_DECODES = 8
_MIN_PREFILLS = 3
_MIN_PREFILL_TOKENS = 64
"""Shorter prefills show the fixed cost of a step rather than the rate."""
_LEAST_GROWTH = 0.02
"""The part of a step's fixed time that each turn adds at least, because it reads KV of its own. Without it a
worker whose batch hardly changed would seem to take any number of turns for free, and so would get all of
them. Half of the smallest value in the simulated testbed (Qwen3-8B on an H800: 0.04)."""
_LEAST_SPREAD = 1.0
"""The variance of the batch, in turns squared, at which the observed growth counts as much as _LEAST_GROWTH.
A batch that varied by less shows mostly noise."""
_AGING_S = 30.0
"""An idle worker's observations lose their weight in this time, about that of two turns. Stalls, bursts of
serving and compilations pass sooner; real differences are seen again with the next turn."""
_TYPICAL_WEIGHT = 4.0
"""What the model's workers show together counts like this many observations of each."""
_PAUSE_S = 1.0
"""If no worker of a model makes tokens for longer, they all pause, as between two RL steps. Estimates don't
age then, because nothing newer is known of any worker."""


@dataclass(slots=True)
class SpeedEstimate:
    """Fits seconds per token to the turns in the batch by least squares, and averages the prefill rate."""

    forget: float = _FORGET
    num_decodes: int = 0
    num_prefills: int = 0
    decode_weight: float = 0.0
    """How many observations of decoding it is worth; forgotten ones count less."""
    prefill_weight: float = 0.0
    # Means, because sums of observations that lost their weight would underflow.
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _prefill_s: float = 0.0
    _prefill_tokens: float = 0.0
    _fitted: tuple[float, float, float] | None = None
    """The cached fit, which every turn asks for; None after a new observation."""

    def saw_decode(self, s_per_token: float, num_turns: int, share: float) -> None:
        """Adds a stretch of decoding with `num_turns` in the batch."""
        x, y = float(num_turns), s_per_token * share
        self.num_decodes += 1
        self._fitted = None
        self.decode_weight = self.forget * self.decode_weight + 1.0
        self._x += (x - self._x) / self.decode_weight
        self._y += (y - self._y) / self.decode_weight
        self._xx += (x * x - self._xx) / self.decode_weight
        self._xy += (x * y - self._xy) / self.decode_weight

    def saw_prefill(self, first_token_s: float, tokens: float, share: float) -> None:
        """Adds a prefill of `tokens`, those of turns ahead included, which took `first_token_s`."""
        if tokens < _MIN_PREFILL_TOKENS:
            return
        self.num_prefills += 1
        self._fitted = None
        self.prefill_weight = self.forget * self.prefill_weight + 1.0
        self._prefill_s += (first_token_s * share - self._prefill_s) / self.prefill_weight
        self._prefill_tokens += (tokens - self._prefill_tokens) / self.prefill_weight

    def weaken(self, kept: float) -> None:
        """Lets all observations so far count `kept` times as much as before, in relation to later ones."""
        self.decode_weight *= kept
        self.prefill_weight *= kept

    def speed(self) -> Speed | None:
        """Returns the fit; None until there are enough observations."""
        return _speed(*self.fit()) if self.is_known else None

    @property
    def is_known(self) -> bool:
        """Whether there are enough observations for a fit."""
        return self.num_decodes >= _MIN_DECODES and self.num_prefills >= _MIN_PREFILLS

    def fit(self) -> tuple[float, float, float]:
        """Returns the prefill's seconds per token, the fixed part of a step, and what each turn adds to it.
        The estimate must be known."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> tuple[float, float, float]:
        least = _LEAST_GROWTH * self._y / (1.0 + _LEAST_GROWTH * self._x)
        variance = max(0.0, self._xx - self._x * self._x)
        covariance = self._xy - self._x * self._y
        slope = (covariance + _LEAST_SPREAD * least) / (variance + _LEAST_SPREAD)
        # Neither part can be negative, whatever the noise suggests.
        slope = min(max(slope, least), self._y / max(self._x, 1e-9))
        return self._prefill_s / self._prefill_tokens, max(0.0, self._y - slope * self._x), slope


@dataclass(slots=True)
class ModelSpeed:
    """What all workers of a model show together."""

    estimate: SpeedEstimate = field(default_factory=lambda: SpeedEstimate(forget=_FORGET_OF_MODEL))
    active_s: float = 0.0
    """How long any of them have made tokens."""
    _shown_at: float = -math.inf

    def saw_decode(self, s_per_token: float, num_turns: int, share: float, now: float) -> None:
        """Adds a stretch of decoding on one of the workers, which ended at `now`."""
        self.estimate.saw_decode(s_per_token, num_turns, share)
        self.active_s += min(max(0.0, now - self._shown_at), _PAUSE_S)
        self._shown_at = now


class ModelSpeeds:
    """The speed of each model behind a router."""

    def __init__(self) -> None:
        self._by_model: dict[str | None, ModelSpeed] = {}

    def of(self, model: str | None) -> ModelSpeed:
        """Returns the speed of the workers whose default model this is; None: of those that don't say it."""
        return self._by_model.setdefault(model, ModelSpeed())


@dataclass(slots=True)
class WorkerSpeed:
    """A worker's speed by its own turns and, the longer it is idle the more, by those of all its model's
    workers.
    """

    model: ModelSpeed = field(default_factory=ModelSpeed)
    _own: SpeedEstimate = field(default_factory=SpeedEstimate)
    _shown_at_s: float = 0.0
    """The model's `active_s` when this worker was last seen to work."""

    def saw_decode(self, s_per_token: float, num_turns: int, share: float, now: float) -> None:
        """Adds a stretch of decoding with `num_turns` in the batch, which ended at `now`."""
        self._own.saw_decode(s_per_token, num_turns, share)
        self.model.saw_decode(s_per_token, num_turns, share, now)
        self._shown_at_s = self.model.active_s

    def saw_prefill(self, first_token_s: float, tokens: float, share: float) -> None:
        """Adds a prefill of `tokens`, those of turns ahead included, which took `first_token_s`."""
        self._own.saw_prefill(first_token_s, tokens, share)
        self.model.estimate.saw_prefill(first_token_s, tokens, share)

    def is_of(self, model: ModelSpeed) -> None:
        """Compares the worker with others that serve the same model, from now on."""
        if model is not self.model:
            self.model, self._shown_at_s = model, model.active_s

    def wakes(self) -> None:
        """Notes that the worker, which was idle, gets a turn."""
        self._own.weaken(self._left())
        self._shown_at_s = self.model.active_s

    def _left(self) -> float:
        """Returns how much of the observations' weight is left since the worker last worked."""
        return math.exp((self._shown_at_s - self.model.active_s) / _AGING_S)

    def speed(self, *, is_idle: bool) -> Speed | None:
        """Returns the mean of the worker's fit and its model's, by their weights; None until the worker has
        enough observations of its own."""
        if not self._own.is_known:
            return None
        if not self.model.estimate.is_known:
            return self._own.speed()
        own, kept = self._own, self._left() if is_idle else 1.0
        decode = _TYPICAL_WEIGHT / (_TYPICAL_WEIGHT + kept * own.decode_weight)
        prefill = _TYPICAL_WEIGHT / (_TYPICAL_WEIGHT + kept * own.prefill_weight)
        prefill_s, step_s, turn_s = own.fit()
        typical_prefill_s, typical_step_s, typical_turn_s = self.model.estimate.fit()
        return _speed(
            prefill_s + prefill * (typical_prefill_s - prefill_s),
            step_s + decode * (typical_step_s - step_s),
            turn_s + decode * (typical_turn_s - turn_s),
        )


def _speed(prefill_s: float, step_s: float, turn_s: float) -> Speed:
    return Speed(prefill_s_per_token=prefill_s, step_s=step_s, step_s_per_turn=turn_s)
