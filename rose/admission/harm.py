"""What rollouts cost serving: how much TTFT and TPOT exceed what they would be without rollouts.

Two things make a serving request slower:

- It waits for a rollout step to end. The scheduler knows for how long, so this part is subtracted from each
  request. It needs little traffic to be known.
- A serving step may take longer beside rollouts, because they use the same caches and CPU. Steps in slices of
  time without rollouts (rose.admission.slices) are compared with those around them, which also shows effects
  that the scheduler does not count.

Everything here is a pure function of records. Nothing is estimated in an engine's step loop.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import numpy.typing as npt

from rose.admission.slices import GROUP_SLICES

RESAMPLES = 100
CONFIDENCE = 0.95
# Both parts of an estimate hold with this confidence, so that their product holds with CONFIDENCE.
PART_CONFIDENCE = 1 - (1 - CONFIDENCE) / 2
MIN_REQUESTS = 30
MAX_REQUESTS = 2000
"""The most requests that an estimate uses, taken evenly from all. More would cost time and add little."""
MIN_GROUPS = 6
"""The least groups of slices with both closed and open ones, for an estimate."""
GROUPS_TO_EXTRAPOLATE = 30
"""The least groups for a forecast. With fewer, Student's quantile makes the noise look larger than it is."""
QUANTILES = (50, 99)
BUSY_PERCENTILES = (75, 90)
"""For each quantile, the percentile of the slices, ordered by how full their batches are, from which its
requests come."""

TENANT_BYTES = 64

MEASURING_SHARE = 0.025
"""The share of the slices that is always closed, which rollouts lose even on an idle GPU. It gives fifteen
closed slices a minute, as many as a retreat within a minute needs."""
CONTROL_EVERY_S = 10.0
"""How often the control looks at the estimate and decides."""
CONTROL_WINDOWS_S = (60.0, 600.0, 3600.0)
"""The control uses the first window in which anything is known. Light traffic needs a longer one."""
LATEST_S = 30.0
"""A window of this length shows a sudden harm sooner, because it has less of the time before. It is too short
to tell a small harm from noise, so it counts only if its lower bound is above what is allowed."""
BACKOFF = 0.5
"""The least part of the open time that one decision leaves."""
HELD_BACK_OPEN = 0.75
"""The most open time that a retreat leaves. A retreat closes ten times as many slices as measuring does, so
the size of the harm is known half a minute later."""
RETURN = 1.15
"""The factor by which the open time grows again."""
LATE_RETURN = 2.0
"""The same factor if each step of the return takes longer than a minute, because traffic is light."""
LEAST_OPEN = 1 / GROUP_SLICES
"""One slice of each group stays open. Without open slices nothing could show that the harm is over."""
DAY_S = 86400.0
STUDENT_Z = 2.2414
"""The two-sided normal quantile at PART_CONFIDENCE."""
UNBOUNDED = 10.0
"""The highest bound that is reported, 1000%. It says that the effect may have any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDelay:
    """One serving request that has ended. ``at_s`` is on CLOCK_MONOTONIC, like every time here."""

    at_s: float
    ttft_s: float
    """0 on a decoder, which gets requests with their first token."""
    ttft_waited_s: float
    """The part of its TTFT in which serving waited for a rollout step."""
    tpot_s: float
    """Mean time per output token after the first; 0 for a request of one token."""
    tpot_waited_s: float
    tenant: str = ""
    """The tenant's name, in at most TENANT_BYTES; empty if the request names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceTime:
    """Serving's steps within one slice of time."""

    number: int
    is_closed: bool
    seconds: float = 0.0
    predicted_s: float = 0.0
    """The seconds that the step-time model predicts for the same steps."""
    fixed_s: float = 0.0
    """The part of ``predicted_s`` that does not grow with the batch."""

    def and_step(self, seconds: float, predicted_s: float, fixed_s: float) -> "SliceTime":
        """Returns the slice with one more step in it."""
        return replace(
            self,
            seconds=self.seconds + seconds,
            predicted_s=self.predicted_s + predicted_s,
            fixed_s=self.fixed_s + fixed_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A share by which a latency differs, with its bounds at 95% confidence; 0.02 is 2% slower."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def scaled(self, share: float) -> "Estimate":
        """Returns the effect over all requests of a cause that acts for a share of the time."""
        return Estimate(value=share * self.value, low=share * self.low, high=share * self.high)

    def __str__(self) -> str:
        return f"{self.value:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmReport:
    """What rollouts cost serving over a stretch of time."""

    num_requests: int
    num_closed_slices: int
    num_groups: int
    """The number of groups with steps in slices of both kinds. Each gives one difference."""
    slowdown: Estimate | None
    """The slowdown of serving's own steps with rollouts let in; None until MIN_GROUPS groups had steps
    in slices of both kinds."""
    latencies: dict[str, Estimate]
    """Estimates by name, such as "ttft_p99". Empty while the slowdown is unknown or requests are too few."""
    measured_s: dict[str, float]
    """The same latencies as measured, with rollouts let in; empty with too few requests."""

    @classmethod
    def nothing(cls) -> "HarmReport":
        """Returns a report without records."""
        return cls(
            num_requests=0, num_closed_slices=0, num_groups=0, slowdown=None, latencies={}, measured_s={}
        )

    @property
    def tails(self) -> list[Estimate]:
        """The estimates of the P99s; empty while nothing is known."""
        return [one for name, one in self.latencies.items() if name.endswith("99")]

    def closed_slices_needed(self, half_width: float) -> int | None:
        """Returns about how many closed slices are needed to know the slowdown to ``half_width``; None while
        nothing is known."""
        if self.slowdown is None:
            return None
        return math.ceil(self.num_closed_slices * (self.slowdown.half_width / half_width) ** 2)

    def shown_in_a_day(self, seconds: float) -> float | None:
        """Returns about the least difference that a day of this traffic can show, from a report on
        ``seconds`` of it; None with too few groups."""
        if self.slowdown is None or self.num_groups < GROUPS_TO_EXTRAPOLATE:
            return None
        return self.slowdown.half_width * math.sqrt(seconds / DAY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHarm:
    """What rollouts do to serving's steps in a stretch of time. It is the same for all requests of that
    time."""

    slowdown: Estimate | None
    """How much slower steps are in open slices; None until MIN_GROUPS groups had steps in slices of both
    kinds."""
    num_closed_slices: int
    num_groups: int
    seconds: float = 0.0
    """The seconds in steps."""
    open_share: float = 0.0
    """The share of ``seconds`` in open slices."""
    growing_shares: tuple[float, ...] = ()
    """The part of a step that grows with the batch, at each of BUSY_PERCENTILES; empty while the slowdown is
    unknown."""

    @classmethod
    def of(cls, slices: Sequence[SliceTime]) -> "StepHarm":
        """Compares closed slices with open ones. It takes milliseconds, so never call it in a step loop."""
        slowdown, num_closed, num_groups = _slowdown(slices)
        if slowdown is None:
            return cls(slowdown=None, num_closed_slices=num_closed, num_groups=num_groups)
        seconds = sum(each.seconds for each in slices)
        growing = [1 - each.fixed_s / each.predicted_s for each in slices if each.predicted_s > 0]
        return cls(
            slowdown=slowdown,
            num_closed_slices=num_closed,
            num_groups=num_groups,
            seconds=seconds,
            open_share=sum(each.seconds for each in slices if not each.is_closed) / seconds if seconds else 0,
            growing_shares=tuple(np.percentile(growing, BUSY_PERCENTILES).tolist()),
        )

    def effects(self, ttft_waited_s: float) -> list[Estimate]:
        """Returns the effects of slower steps on the latencies, one for each of QUANTILES; none while the
        slowdown is unknown. ``ttft_waited_s``: for how long requests waited for rollout steps, in all."""
        if self.slowdown is None or self.seconds <= 0:
            return []
        effect, waited_share = self.slowdown.scaled(self.open_share), ttft_waited_s / self.seconds
        return [_with_fuller_batches(effect, grows, waited_share) for grows in self.growing_shares]


def estimate_harm(requests: Sequence[RequestDelay], steps: StepHarm, *, seed: int = 0) -> HarmReport:
    """Estimates the harm to some requests. It takes milliseconds, so never call it in a step loop."""
    effects = steps.effects(sum(each.ttft_waited_s for each in requests)) if requests else []
    latencies: dict[str, Estimate] = {}
    measured_s: dict[str, float] = {}
    rng = np.random.default_rng(seed)
    some = requests[:: max(1, math.ceil(len(requests) / MAX_REQUESTS))]
    ttft = [(each.ttft_s, each.ttft_waited_s) for each in some if each.ttft_s > 0]
    tpot = [(each.tpot_s, each.tpot_waited_s) for each in some if each.tpot_s > 0]
    for kind, pairs in (("ttft", ttft), ("tpot", tpot)):
        if len(pairs) < MIN_REQUESTS:
            continue
        values, waited = np.array(pairs).T
        names = [f"{kind}_p{percent}" for percent in QUANTILES]
        measured_s |= zip(names, np.percentile(values, QUANTILES).tolist(), strict=True)
        if effects:
            parts = zip(_waiting(values, waited, rng), effects, strict=True)
            latencies |= zip(names, (_product(*both) for both in parts), strict=True)
    return HarmReport(
        num_requests=len(requests),
        num_closed_slices=steps.num_closed_slices,
        num_groups=steps.num_groups,
        slowdown=steps.slowdown,
        latencies=latencies,
        measured_s=measured_s,
    )


def _waiting(
    values: npt.NDArray[np.float64], waited: npt.NDArray[np.float64], rng: np.random.Generator
) -> list[Estimate]:
    """Returns by how much the quantiles of ``values`` exceed those of the same requests without their waits.

    The bounds come from a percentile bootstrap over requests.
    """
    without = np.maximum(values - waited, 1e-9)
    index = rng.integers(len(values), size=(RESAMPLES, len(values)))
    whole, less = (np.percentile(each[index], QUANTILES, axis=1) for each in (values, without))
    tail = 100 * (1 - PART_CONFIDENCE) / 2
    low, high = np.percentile(whole / less - 1, (tail, 100 - tail), axis=1)
    value = np.percentile(values, QUANTILES) / np.percentile(without, QUANTILES) - 1
    return [
        Estimate(value=float(each), low=float(min(each, down)), high=float(max(each, up)))
        for each, down, up in zip(value, low, high, strict=True)
    ]


def _slowdown(slices: Sequence[SliceTime]) -> tuple[Estimate | None, int, int]:
    """Returns by how much steps are slower in open slices, and the number of closed slices and of groups that
    were used.

    Closed slices are compared with the open ones of their group, so that a drift of the machine cancels. A
    group gives one difference, however many slices it has of either kind, so differences share no slice and
    are independent.
    """
    groups = defaultdict[int, tuple[list[float], list[float]]](lambda: ([], []))
    for each in slices:
        if each.predicted_s > 0 and each.seconds > 0:
            ratio = each.seconds / each.predicted_s
            groups[each.number // GROUP_SLICES][each.is_closed].append(math.log(ratio))
    compared = [(opened, closed) for opened, closed in groups.values() if opened and closed]
    num_closed = sum(len(closed) for _, closed in compared)
    # Means of logarithms do not depend on the number of slices; means of ratios would.
    differences = [fmean(opened) - fmean(closed) for opened, closed in compared]
    count = len(differences)
    if count < MIN_GROUPS:
        return None, num_closed, count
    mean, error = float(np.mean(differences)), float(np.std(differences, ddof=1)) / math.sqrt(count)
    reach = _student_t(count - 1) * error
    return (
        Estimate(value=math.expm1(mean), low=math.expm1(mean - reach), high=math.expm1(mean + reach)),
        num_closed,
        count,
    )


def _with_fuller_batches(slowdown: Estimate, grows: float, waited_share: float) -> Estimate:
    """Widens the upper bound by the effect of slower steps and waits on later steps: requests stay longer, so
    batches are fuller. ``waited_share``: the time that requests waited for rollout steps, over that in steps.

    A step takes T = fixed + c * N, and its N requests are in proportion to T (Little's law). So the whole
    effect of a factor f is f * (1 - x) / (1 - f * x), with x the part of a step that grows with the batch
    (``grows``). It is taken at a percentile of the slices, because requests at a high quantile met full
    batches.
    """
    factor = 1 + max(0.0, slowdown.high) + waited_share
    if factor * grows >= 1:
        return replace(slowdown, high=UNBOUNDED)
    whole = factor * (1 - grows) / (1 - factor * grows) - 1
    return replace(slowdown, high=min(UNBOUNDED, max(slowdown.high, whole)))


def _student_t(freedom: int) -> float:
    """Returns the two-sided quantile of Student's t at PART_CONFIDENCE (97.5%), within 2% from 5 degrees on.

    Source: the expansion of Abramowitz and Stegun 26.7.5 about the normal quantile.
    """
    z = STUDENT_Z
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _product(one: Estimate, other: Estimate) -> Estimate:
    """Combines two effects. Its bounds hold if the bounds of both effects hold."""
    return Estimate(
        value=(1 + one.value) * (1 + other.value) - 1,
        low=(1 + one.low) * (1 + other.low) - 1,
        high=(1 + one.high) * (1 + other.high) - 1,
    )


class HarmControl:
    """Chooses the share of the time for which rollouts are shut out. Pure: it holds only that choice.

    Some slices are always closed, to measure. If the harm is above the bound, more are closed until the harm
    over all requests is within it.
    """

    def __init__(self, allowed: float) -> None:
        """``allowed``: the share by which the P99 of TTFT and TPOT may differ, for example 0.02."""
        self.allowed = allowed
        self._open = 1.0
        self._changed_s = -math.inf
        self._took_s = CONTROL_WINDOWS_S[0]
        """The seconds that it took to know the harm that caused the last retreat."""

    @property
    def is_retreating(self) -> bool:
        """Whether rollouts are shut out for more of the time than measuring takes."""
        return 1 - self._open > MEASURING_SHARE

    @property
    def closed_share(self) -> float:
        """The share of slices to close."""
        return max(MEASURING_SHARE, 1 - self._open)

    def window_starts(self, now: float) -> list[float]:
        """Returns the starts of the windows to report on, shortest window first. None lies before the last
        choice."""
        return sorted({max(self._changed_s, now - window_s) for window_s in CONTROL_WINDOWS_S}, reverse=True)

    def latest_start(self, now: float) -> float:
        """Returns the start of the window of LATEST_S, which does not lie before the last choice either."""
        return max(self._changed_s, now - LATEST_S)

    def let_in(self, now: float) -> None:
        """Lets rollouts in again, for all but the measuring share."""
        self._open, self._changed_s = 1.0, now

    def update(
        self, report: HarmReport, now: float, latest: HarmReport | None = None, seconds: float = 0.0
    ) -> None:
        """Adapts the choice to a report on ``seconds``, and to the ``latest`` one, from latest_start().

        Rollouts are let in again step by step while the harm is known to be within the bound. They also are
        once the harm has been unknown for as long as it took to know it, in larger steps if that was long, or
        after a minute without requests.
        """
        tails, before = report.tails, self._open
        recent = latest.tails if latest is not None else []
        is_silent = (latest if latest is not None else report).num_requests == 0
        held_s = CONTROL_WINDOWS_S[0] if is_silent else self._took_s
        worst = _worst(tails)
        if worst > self.allowed or any(one.low > self.allowed for one in recent):
            worst = max(worst, _worst(recent))
            left = min(HELD_BACK_OPEN, self._open * max(BACKOFF, self.allowed / worst))
            self._open = max(LEAST_OPEN, left)
            self._took_s = max(CONTROL_WINDOWS_S[0], seconds)
        elif all(one.value <= self.allowed for one in tails) and (tails or now - self._changed_s >= held_s):
            step = RETURN if tails or held_s <= CONTROL_WINDOWS_S[0] else LATE_RETURN
            self._open = min(1.0, self._open * step)
        if self._open != before:
            self._changed_s = now


def _worst(tails: Sequence[Estimate]) -> float:
    """Returns the greatest difference that is more than noise; 0 without any."""
    return max((one.value for one in tails if one.low > 0), default=0.0)
