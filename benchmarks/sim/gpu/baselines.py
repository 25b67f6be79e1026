"""Other ways for two pipelines to share GPUs: rollouts alone side by side, time multiplexing, and the paper's
own cost of a window.

Policies for the shipped player. One iteration after the other is what gains are relative to.
"""

from collections.abc import Sequence

from rose.scheduler.gpu.lookahead import ALONE, Action, Next
from rose.scheduler.gpu.merge import Merge, WorkerTail
from rose.scheduler.gpu.plan import Multiplexing
from rose.scheduler.gpu.slowdown import WHOLE, Share
from rose.scheduler.gpu.substages import Iteration, SubStageKind

_HALF = Share(compute=0.5, memory=0.5)


class _Plain:
    """Neither balances nor merges."""

    is_balanced = False

    def merge(
        self, tails: Sequence[WorkerTail], pipeline: Iteration, beside_s: float, is_elastic: bool
    ) -> Merge | None:
        return None


class RolloutOnly(_Plain):
    """Two rollouts share a GPU by halves; reference and training have it alone (JigsawRL-MuxServe)."""

    def decide(self, upcoming: tuple[Sequence[Next], Sequence[Next]], first: int) -> Action:
        one, two = (chain[0].kind for chain in upcoming)
        if one.is_rollout and two.is_rollout:
            return Action(shares=(_HALF, _HALF), rates=(1.0, 1.0))
        if one.is_rollout or two.is_rollout:
            return ALONE[1 if one.is_rollout else 0]
        return ALONE[first]


class TimeMultiplexing(_Plain):
    """Rollouts have GPUs of their own, training the others; each pool serves one pipeline at a time
    (RollMux)."""

    def decide(self, upcoming: tuple[Sequence[Next], Sequence[Next]], first: int) -> Action:
        one, two = (chain[0].kind for chain in upcoming)
        if one.is_rollout != two.is_rollout:
            return Action(shares=(WHOLE, WHOLE), rates=(1.0, 1.0))
        return ALONE[first]


class LongestChain(Multiplexing):
    """The shipped policy with JigsawRL's cost: a window ends with the longest chain in it."""

    def beyond_s(self, one_s: float, two_s: float) -> float:
        return max(one_s, two_s)


class Disaggregated:
    """Rollouts and training that run at once are on different GPUs, and cost one another nothing."""

    def slowdown(self, kind: SubStageKind, beside: SubStageKind | None, share: Share) -> float:
        return 1.0
