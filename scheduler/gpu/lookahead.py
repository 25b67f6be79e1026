"""What runs on a worker now: both pipelines with shares, or one of them.

Owns the search. It returns the first action of the sequence that brings a worker's next sub-stages furthest
in the least time. Source: JigsawRL §4.4.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rose.scheduler.gpu.slowdown import WHOLE, Share, Slowdowns, Split, splits
from rose.scheduler.gpu.substages import SubStageKind

LEAST_MEMORY = 0.2
"""What a sub-stage needs at least of the GPU's memory, unless the pipeline says otherwise."""
_TIE = 1e-6
"""Relative: of actions with the same longest chain, the one that does most work in each second wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """A sub-stage that is to come on a worker, and what it has left, alone on the whole GPU."""

    kind: SubStageKind
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """The shares of the two pipelines on a worker; None: the pipeline pauses there."""

    shares: tuple[Share | None, Share | None]
    rates: tuple[float, float]
    """Predicted progress: seconds of work alone, in each second."""

    @property
    def is_shared(self) -> bool:
        return None not in self.shares


ALONE = (Action(shares=(WHOLE, None), rates=(1.0, 0.0)), Action(shares=(None, WHOLE), rates=(0.0, 1.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """When a pipeline's iteration began, and the one before it. `is_exclusive`: it is in a phase that neither
    shares a worker nor pauses."""

    began_s: float
    before_s: float
    is_exclusive: bool


def first_of(one: Claim, two: Claim) -> int:
    """Returns which pipeline goes on if only one can.

    That is the one whose iteration began earlier. But an exclusive phase overtakes the other pipeline once an
    iteration: the other one goes on behind a merged tail, while an exclusive phase can't begin there. The
    answer never changes within an exclusive phase, so it is never paused.
    """
    if one.is_exclusive != two.is_exclusive:
        index = 0 if one.is_exclusive else 1
        overtakes = (one, two)[index].before_s <= (two, one)[index].began_s
        return index if overtakes else 1 - index
    return 0 if one.began_s <= two.began_s else 1


class LookAhead:
    """Chooses actions for one pair of pipelines by searching `window` sub-stages ahead.

    `least_memory`: of each pipeline, by kind. Pairs with an unknown slowdown, or without room for both, run
    one after the other.
    """

    def __init__(
        self,
        slowdowns: Slowdowns,
        window: int = 3,
        least_memory: Sequence[Mapping[SubStageKind, float]] = ({}, {}),
        grid: Sequence[Split] | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"the window must be at least 1, got {window}")
        self._slowdowns = slowdowns
        self._window = window
        self._least_memory = least_memory
        self._splits = grid if grid is not None else splits()
        self._shared: dict[tuple[SubStageKind, SubStageKind], list[Action]] = {}

    def decide(self, upcoming: tuple[Sequence[Next], Sequence[Next]], first: int) -> Action:
        """Returns what runs now. `upcoming`: both pipelines' next sub-stages here, what is ready at first.

        `first`: the pipeline that goes on if only one can: whose iteration began earlier.
        """
        chains = [list(each[: self._window]) for each in upcoming]
        if not chains[0] or not chains[1]:
            return ALONE[0 if chains[0] else 1]
        search = _Search(self, chains[0], chains[1], first)
        best, least_s = ALONE[first], math.inf
        for action in self.actions(chains[0][0].kind, chains[1][0].kind, first):
            cost_s = search.cost_s(action, 0, 0, chains[0][0].seconds, chains[1][0].seconds, least_s)
            if cost_s < least_s * (1 - _TIE):
                best, least_s = action, cost_s
        return best

    def beyond_s(self, one_s: float, two_s: float) -> float:
        """Returns what the search charges for the work that both chains have left at its end.

        The least time that could take both: half of it. The paper charges the longer chain. But windows are
        not equally long, and the pipelines go on after them: the longer one would get the GPU alone for being
        longer.
        """
        return (one_s + two_s) / 2

    def actions(self, one: SubStageKind, two: SubStageKind, first: int) -> list[Action]:
        """Returns the candidates for a pair: splits that no other one beats for both, and `first` alone.

        A pair that can't share has both alone: a short sub-stage must not keep the pipelines out of step.
        """
        if one is SubStageKind.TOOL or two is SubStageKind.TOOL:  # a tool takes nothing of the GPU
            return [Action(shares=(WHOLE, WHOLE), rates=(1.0, 1.0))]
        if (one, two) not in self._shared:
            self._shared[one, two] = self._undominated(one, two)
        shared = self._shared[one, two]
        return [*shared, ALONE[first]] if shared else [ALONE[first], ALONE[1 - first]]

    def _undominated(self, one: SubStageKind, two: SubStageKind) -> list[Action]:
        found = []
        for split in self._splits:
            if split.first.memory < self._least_memory[0].get(one, LEAST_MEMORY):
                continue
            if split.second.memory < self._least_memory[1].get(two, LEAST_MEMORY):
                continue
            slow = self._slowdowns.slowdown(one, two, split.first)
            other = self._slowdowns.slowdown(two, one, split.second)
            if slow is not None and other is not None:
                found.append(Action(shares=(split.first, split.second), rates=(1 / slow, 1 / other)))
        best = [
            each
            for index, each in enumerate(found)
            if not any(_beats(other, each, position < index) for position, other in enumerate(found))
        ]
        return sorted(best, key=lambda action: -sum(action.rates))


def _beats(one: Action, other: Action, is_earlier: bool) -> bool:
    is_as_good = one.rates[0] >= other.rates[0] and one.rates[1] >= other.rates[1]
    return one is not other and is_as_good and (one.rates != other.rates or is_earlier)


class _Search:
    """One decision's search: each action lasts until a sub-stage ends, `window` times."""

    def __init__(self, policy: LookAhead, one: Sequence[Next], two: Sequence[Next], first: int) -> None:
        self._policy = policy
        self._chains = (one, two)
        self._first = first
        self._after = tuple([sum(n.seconds for n in c[k + 1 :]) for k in range(len(c))] for c in (one, two))
        self._depth = max(len(one), len(two))

    def cost_s(
        self, action: Action, one: int, two: int, one_s: float, two_s: float, bound_s: float, ended: int = 0
    ) -> float:
        """Returns C(a, r), with sub-stages `one` and `two` ready, of which `ended` more have ended.

        What can't become less than `bound_s` is not searched further.
        """
        rate_one, rate_two = action.rates
        one_ends_s = one_s / rate_one if rate_one else math.inf
        two_ends_s = two_s / rate_two if rate_two else math.inf
        passed_s = min(one_ends_s, two_ends_s)
        one_s, two_s = one_s - passed_s * rate_one, two_s - passed_s * rate_two
        if one_ends_s <= passed_s:
            one += 1
            one_s = self._chains[0][one].seconds if one < len(self._chains[0]) else 0.0
        if two_ends_s <= passed_s:
            two += 1
            two_s = self._chains[1][two].seconds if two < len(self._chains[1]) else 0.0
        rest = self._rest_s(0, one, one_s), self._rest_s(1, two, two_s)
        least_s = passed_s + self._policy.beyond_s(*rest)
        if ended + 1 >= self._depth or least_s >= bound_s or not all(rest):
            return least_s
        found_s = bound_s - passed_s
        for each in self._policy.actions(self._chains[0][one].kind, self._chains[1][two].kind, self._first):
            found_s = min(found_s, self.cost_s(each, one, two, one_s, two_s, found_s, ended + 1))
        return passed_s + found_s

    def _rest_s(self, pipeline: int, index: int, seconds: float) -> float:
        return seconds + self._after[pipeline][index] if index < len(self._chains[pipeline]) else 0.0
