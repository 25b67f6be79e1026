"""How fast a worker is, learned from the turns that ran on it.

Owns: SpeedEstimate, a running fit of the two parts of a decode step and of the prefill's rate.
Promises: bounded memory, recent turns count most; times are those of a whole GPU (wall time x share), so that
an estimate made under load holds in quiet.
Never does: I/O, read a clock.
"""

from dataclasses import dataclass

from rose.scheduler.rollout.placing.views import Speed

_FORGET = 0.98
"""Weight left to an observation after one more: about the last 50 count."""
_MIN_DECODES = 8
_MIN_PREFILLS = 3
_MIN_PREFILL_TOKENS = 64
"""Shorter prefills tell of the fixed cost of a step, not of the rate."""


@dataclass(slots=True)
class SpeedEstimate:
    """Least squares of seconds per token over turns in the batch; the mean rate of prefills."""

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
    """The fit, until something new was seen: it is asked for with every turn."""

    def saw_decode(self, s_per_token: float, num_turns: int, share: float) -> None:
        """One stretch of decoding with `num_turns` in the batch."""
        x, y = float(num_turns), s_per_token * share
        self.num_decodes += 1
        self._known = None
        self._weight = _FORGET * self._weight + 1.0
        self._x = _FORGET * self._x + x
        self._y = _FORGET * self._y + y
        self._xx = _FORGET * self._xx + x * x
        self._xy = _FORGET * self._xy + x * y

    def saw_prefill(self, first_token_s: float, tokens: float, share: float) -> None:
        """A first token came after so long; `tokens` were to prefill, those ahead of it included."""
        if tokens < _MIN_PREFILL_TOKENS:
            return
        self.num_prefills += 1
        self._known = None
        self._prefill_s = _FORGET * self._prefill_s + first_token_s * share
        self._prefill_tokens = _FORGET * self._prefill_tokens + tokens

    def speed(self) -> Speed | None:
        """None until enough was seen."""
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
            # Neither part can be negative, whatever the noise says.
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
            slope = min(max(slope, 0.0), mean_y / max(mean_x, 1e-9))
        return Speed(
            prefill_s_per_token=self._prefill_s / self._prefill_tokens,
            step_s=max(0.0, mean_y - slope * mean_x),
            step_s_per_turn=slope,
        )
