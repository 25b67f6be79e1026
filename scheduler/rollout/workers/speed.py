"""How fast a worker is, as learned from the turns that ran on it.

Owns: SpeedEstimate, a running fit of the two parts of a decode step and of the prefill rate.
Promises: memory is bounded and recent turns count most. Times are those of a whole GPU (wall time x share),
so that an estimate made under load also holds without load.
Never does: I/O, read a clock.
"""

from dataclasses import dataclass

from rose.scheduler.rollout.placing.views import Speed

_FORGET = 0.98
"""The weight of an observation relative to the next one, so that about the last 50 count."""
_MIN_DECODES = 8
_MIN_PREFILLS = 3
_MIN_PREFILL_TOKENS = 64
"""Shorter prefills show the fixed cost of a step rather than the rate."""


@dataclass(slots=True)
class SpeedEstimate:
    """Fits seconds per token to the turns in the batch by least squares, and averages the prefill rate."""

    num_decodes: int = 0
    num_prefills: int = 0
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _prefill_s: float = 0.0
    _prefill_tokens: float = 0.0
    _known: Speed | None = None
    """The cached fit, which every turn asks for; None after a new observation."""

    def saw_decode(self, s_per_token: float, num_turns: int, share: float) -> None:
        """Adds a stretch of decoding with `num_turns` in the batch."""
        x, y = float(num_turns), s_per_token * share
        self.num_decodes += 1
        self._known = None
        self._weight = _FORGET * self._weight + 1.0
        self._x = _FORGET * self._x + x
        self._y = _FORGET * self._y + y
        self._xx = _FORGET * self._xx + x * x
        self._xy = _FORGET * self._xy + x * y

    def saw_prefill(self, first_token_s: float, tokens: float, share: float) -> None:
        """Adds a prefill of `tokens`, those of turns ahead included, which took `first_token_s`."""
        if tokens < _MIN_PREFILL_TOKENS:
            return
        self.num_prefills += 1
        self._known = None
        self._prefill_s = _FORGET * self._prefill_s + first_token_s * share
        self._prefill_tokens = _FORGET * self._prefill_tokens + tokens

    def speed(self) -> Speed | None:
        """Returns the fit; None until there are enough observations."""
        if self.num_decodes < _MIN_DECODES or self.num_prefills < _MIN_PREFILLS:
            return None
        if self._known is None:
            self._known = self._fit()
        return self._known

    def _fit(self) -> Speed:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if variance > 1e-9:
            # Neither part can be negative, whatever the noise suggests.
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
            slope = min(max(slope, 0.0), mean_y / max(mean_x, 1e-9))
        return Speed(
            prefill_s_per_token=self._prefill_s / self._prefill_tokens,
            step_s=max(0.0, mean_y - slope * mean_x),
            step_s_per_turn=slope,
        )
