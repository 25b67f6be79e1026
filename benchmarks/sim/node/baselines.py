"""LeMix's baselines, and LeMix as it is printed. For comparison only.

Source: LeMix §VI-A: SEPARATE, its dynamic form (§II-B), MIX-RR (NAIVEMIX) and MIX-LUF; §IV-C: LeMix as
printed. They push each task to a node when it arrives, and a stage runs what was ready first.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from rose.scheduler.node.model import Lengths, NodeProfile, PassCost, Task
from rose.scheduler.node.plan import NodePlan
from rose.types import Assignment

LUF_DECISION_S = 0.076
"""What asking for the GPUs' utilization takes. Source: LeMix Table III."""
_DYNAMIC_RPS = 50.0
"""From this request rate on, two of four nodes serve, below it one. Source: LeMix §II-B."""
_RATE_WINDOW_S = 2.0


class _Pushing:
    """A policy that is told nothing and decides at arrival."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes

    def place(self, task: Task, now: float) -> Assignment | None:
        raise NotImplementedError

    def ask_order(self, now: float) -> list[int]:
        return []

    def pull(self, node: int, now: float) -> Task | None:
        return None

    def forward_ended(self, node: int, task: Task, stage: int, now: float) -> None: ...

    def backward_ended(self, node: int, task: Task, stage: int, now: float) -> None: ...

    def observe(self, node: int, stage: int, tokens: float, pairs: float, seconds: float) -> None: ...

    def decoding(self, node: int, num_sequences: int, context_tokens: int) -> None: ...


class RoundRobin(_Pushing):
    """MIX-RR: all tasks, all nodes, in turn."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)
        self._next = 0

    def place(self, task: Task, now: float) -> Assignment | None:
        node, self._next = self._next, (self._next + 1) % self.num_nodes
        return Assignment(where=node, finish_s=math.inf)


class LeastUtilized(_Pushing):
    """MIX-LUF: the node that has worked least so far. Work counts by the profile when it is assigned."""

    def __init__(self, num_nodes: int, profile: NodeProfile) -> None:
        super().__init__(num_nodes)
        self._profile, self._busy_s = profile, [0.0] * num_nodes

    def place(self, task: Task, now: float) -> Assignment | None:
        node = min(range(self.num_nodes), key=self._busy_s.__getitem__)
        self._busy_s[node] += self._profile.forward_s(task.prompt_tokens)
        if task.is_training:
            self._busy_s[node] += self._profile.backward_s(task.prompt_tokens)
        return Assignment(where=node, finish_s=math.inf)


class Separate(_Pushing):
    """Nodes for training alone and for serving alone, each in turn.

    floor(N share + 0.5) nodes train. That is 0 of 4 at a share of 10%, and 4 at 90%; where there are tasks of
    both kinds, at least one node is left to each.
    """

    def __init__(self, num_nodes: int, training_share: float) -> None:
        super().__init__(num_nodes)
        num_training = math.floor(num_nodes * training_share + 0.5)
        if 0 < training_share < 1:
            num_training = min(max(num_training, 1), num_nodes - 1)
        self.num_training = num_training
        self._next = {True: 0, False: 0}

    def place(self, task: Task, now: float) -> Assignment | None:
        self._arrived(task, now)
        nodes = self.num_training if task.is_training else self.num_nodes - self.num_training
        turn = self._next[task.is_training] % nodes
        self._next[task.is_training] += 1
        return Assignment(where=turn if task.is_training else self.num_training + turn, finish_s=math.inf)

    def _arrived(self, task: Task, now: float) -> None:
        """A fixed partition learns nothing from arrivals."""


class SeparateDynamic(Separate):
    """SEPARATE that serves on one node at low request rates and on half of the nodes otherwise."""

    def __init__(self, num_nodes: int, training_share: float) -> None:
        super().__init__(num_nodes, training_share)
        self._is_mixed = 0 < training_share < 1
        self._recent: deque[float] = deque()

    def _arrived(self, task: Task, now: float) -> None:
        self._recent.append(now)
        while self._recent[0] < now - _RATE_WINDOW_S:
            self._recent.popleft()
        if self._is_mixed:
            is_busy = len(self._recent) / _RATE_WINDOW_S >= _DYNAMIC_RPS
            self.num_training = self.num_nodes - (self.num_nodes // 2 if is_busy else 1)


class Printed(_Pushing):
    """LeMix with equations 1 to 4 and the cost model as printed; `score` may replace equation 3.

    Equation 4's next request is one of mean length that would come now, as the queue rarely holds the real
    one. A training task that it defers is taken by the first node that has nothing to start.
    """

    def __init__(
        self,
        num_nodes: int,
        profile: NodeProfile,
        mean_tokens: float,
        slo_s: float,
        score: Callable[[float, float, float], float] | None = None,
    ) -> None:
        super().__init__(num_nodes)
        self._profile, self._mean, self._slo_s = _quadratic(profile, mean_tokens), mean_tokens, slo_s
        self._score = score if score is not None else _printed_score
        self.plans = [NodePlan(len(profile.stages)) for _ in range(num_nodes)]
        self._lengths = [Lengths() for _ in range(num_nodes)]
        self._deferred: deque[Task] = deque()
        self._last_s = 0.0

    def place(self, task: Task, now: float) -> Assignment | None:
        gap_s, self._last_s = now - self._last_s, now
        if task.is_training and self._delays(now):
            self._deferred.append(task)
            return None
        forwards = self._profile.forwards(task.prompt_tokens)
        scores = []
        for plan, lengths in zip(self.plans, self._lengths, strict=True):
            idle_s, response_s = plan.look(now, forwards)
            profit_s = -max(idle_s / len(forwards) - gap_s, 0.0)
            scores.append(self._score(profit_s, lengths.consistency(task.prompt_tokens), response_s))
        node = max(range(self.num_nodes), key=scores.__getitem__)
        return self._plan(task, node, now)

    def pull(self, node: int, now: float) -> Task | None:
        if not self._deferred or self._delays(now):
            return None
        task = self._deferred.popleft()
        self._plan(task, node, now)
        return task

    def forward_ended(self, node: int, task: Task, stage: int, now: float) -> None:
        self.plans[node].calibrate(task.number, stage, now)

    def backward_ended(self, node: int, task: Task, stage: int, now: float) -> None:
        self.plans[node].calibrate_backward(task.number, stage)

    def _plan(self, task: Task, node: int, now: float) -> Assignment:
        plan = self.plans[node]
        end_s = plan.add(task.number, now, self._profile.forwards(task.prompt_tokens))
        if task.is_training:
            plan.add_backwards(task.number, end_s, self._profile.backwards(task.prompt_tokens))
        self._lengths[node].add(task.prompt_tokens)
        return Assignment(where=node, finish_s=end_s)

    def _delays(self, now: float) -> bool:
        """Equation 4: the last planned end on the last stage, and one stage's forward time."""
        one_s = self._profile.forwards(self._mean)[-1]
        return min(max(plan.ends[-1], now) for plan in self.plans) + one_s - now > self._slo_s


def corrected_score(profit_s: float, fit: float, response_s: float) -> float:
    return profit_s + 0.05 * fit - response_s


def _printed_score(profit_s: float, fit: float, response_s: float) -> float:
    return (profit_s + 0.05 * fit) / response_s


def _quadratic(profile: NodeProfile, mean_tokens: float) -> NodeProfile:
    """The printed cost, coefficient x l^2, fitted at the mean length."""
    stages = []
    for stage in profile.stages:
        pair = [
            PassCost(
                constant_s=0.0,
                per_token_s=0.0,
                per_pair_s=cost.seconds(mean_tokens, mean_tokens**2) / mean_tokens**2,
            )
            for cost in (stage.forward, stage.backward)
        ]
        stages.append(replace(stage, forward=pair[0], backward=pair[1]))
    return replace(profile, stages=tuple(stages))
