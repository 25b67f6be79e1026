"""Which node runs an inference request, and when a node may start a training microbatch.

Owns the queue of training tasks and the choice. Promises the same choices for the same calls. Never runs
anything: whoever runs the passes reports their ends.

Source: LeMix §IV-C. Where we differ: equation 3 as printed divides a negative number by the response time and
so prefers slow nodes; here the response time is subtracted. A node's score decides among the nodes on which
the request keeps its SLO with room to spare, or that are about as fast as the fastest. Training waits in one
queue for all nodes, and a node pulls a task when it has nothing else to start and equation 4 allows it.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rose.scheduler.node.model import Lengths, NodeProfile, Task
from rose.scheduler.node.pieces import GIVE_WAY_S
from rose.scheduler.node.plan import NodePlan
from rose.types import Assignment

_AS_FAST = 0.05
"""Response times within this share of the SLO are equal: nodes' measured speeds differ by noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an operator may weigh. The defaults keep the SLO first and then fill few nodes."""

    slo_s: float
    """The longest response time, tau_R; LeMix takes five forward passes."""
    response_weight: float = 1.0
    """lambda_1: a second of response time against a second of idle time."""
    consistency_s: float = 0.05
    """lambda_2: the idle seconds that a perfect fit of lengths is worth."""
    idle_tolerance_s: float = 0.0
    """tau: idle time below which nodes are equally good."""
    fill_share: float = 0.5
    """A node is filled up while the predicted response time stays within this share of the SLO."""
    give_way_s: float = GIVE_WAY_S
    """A training pass stops within this time when a request is due: it is split by groups of layers."""
    max_guests: int = 8
    """Training tasks that a node may have begun. More fill its pipeline better, and hold more memory."""

    def __post_init__(self) -> None:
        times = (self.slo_s, self.give_way_s)
        if not all(each > 0 for each in times) or not 0 <= self.fill_share <= 1:
            raise ValueError(f"slo_s and give_way_s must be positive, and fill_share from 0 to 1; got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeScore:
    """How good a node is for a task."""

    node: int
    idle_s: float
    """Pi: idle seconds on all of the node's stages together."""
    response_s: float
    """R: the predicted response time."""
    profit_s: float
    """Equation 1."""
    consistency: float
    """Equation 2, from 0 to 1."""
    score_s: float
    """Equation 3, corrected."""


class NodePolicy:
    """The node level's decisions for nodes of one model and one kind."""

    def __init__(self, profile: NodeProfile, num_nodes: int, rules: Rules) -> None:
        self.profile, self.rules = profile, rules
        self.training: deque[Task] = deque()
        """Training tasks that no node has started."""
        self.plans = [NodePlan(len(profile.stages), rules.give_way_s) for _ in range(num_nodes)]
        self._lengths = [Lengths() for _ in range(num_nodes)]
        self._requests = Lengths()
        self._guests = [0] * num_nodes
        """Training tasks that each node has begun."""
        self._last_arrival_s = 0.0

    def place(self, task: Task, now: float) -> Assignment | None:
        """Returns the node for a task; None if it waits in the queue of training tasks until a node pulls
        it."""
        gap_s, self._last_arrival_s = now - self._last_arrival_s, now
        if task.is_training:
            self.training.append(task)
            return None
        self._requests.add(task.prompt_tokens)
        forwards = self.profile.forwards(task.prompt_tokens)
        node = self._choose([self._score(n, task, now, gap_s, forwards) for n in range(len(self.plans))])
        self._lengths[node].add(task.prompt_tokens)
        return Assignment(where=node, finish_s=self.plans[node].add(task.number, now, forwards))

    def scores(self, task: Task, now: float) -> list[NodeScore]:
        """Returns every node's score for a task that would arrive now. Nothing is planned."""
        gap_s, forwards = now - self._last_arrival_s, self.profile.forwards(task.prompt_tokens)
        return [
            NodeScore(
                node=node,
                idle_s=idle_s,
                response_s=response_s,
                profit_s=profit_s,
                consistency=fit,
                score_s=score_s,
            )
            for node in range(len(self.plans))
            for score_s, response_s, idle_s, profit_s, fit in [self._score(node, task, now, gap_s, forwards)]
        ]

    def ask_order(self, now: float) -> list[int]:
        """Returns the nodes to offer waiting training tasks to, the best first."""
        if not self.training:
            return []
        task = self.training[0]
        scores = self.scores(task, now)
        return sorted(range(len(self.plans)), key=lambda node: (-scores[node].score_s, node))

    def pull(self, node: int, now: float) -> Task | None:
        """Returns the training task that an idle node may start now, if any.

        Source: LeMix equation 4, for the next request of mean length; each stage's time counts, not one's.
        """
        if not self.training or self._guests[node] >= self.rules.max_guests or self.delays_requests(now):
            return None
        task = self.training.popleft()
        self._guests[node] += 1
        self._lengths[node].add(task.prompt_tokens)
        tokens = task.prompt_tokens
        forwards, backwards = self.profile.forwards(tokens), self.profile.backwards(tokens)
        self.plans[node].add_guest(task.number, now, forwards, backwards)
        return task

    def delays_requests(self, now: float) -> bool:
        """Returns whether a request of mean length would miss its SLO on every node, for what is planned
        there.

        An SLO that even idle nodes miss holds nothing back.
        """
        if not self._requests.count:
            return False
        forwards = self.profile.forwards(self._requests.mean)
        limit_s = max(self.rules.slo_s, 2 * sum(forwards))
        return all(plan.look(now, forwards)[1] > limit_s for plan in self.plans)

    def forward_ended(self, node: int, task: Task, stage: int, now: float) -> None:
        self.plans[node].calibrate(task.number, stage, now)

    def backward_ended(self, node: int, task: Task, stage: int, now: float) -> None:
        self.plans[node].calibrate_backward(task.number, stage)
        if stage == 0:
            self._guests[node] -= 1

    def observe(self, node: int, stage: int, tokens: float, pairs: float, seconds: float) -> None:
        """A forward pass of these tokens took so long on the stage."""
        self.plans[node].observe(self.profile.stages[stage].forward.seconds(tokens, pairs), seconds)

    def decoding(self, node: int, num_sequences: int, context_tokens: int) -> None:
        """The node now decodes this many sequences: each pass takes longer, and waits for the one before."""
        plan = self.plans[node]
        for index, stage in enumerate(self.profile.stages):
            cost, pairs = stage.forward, 2 * context_tokens + num_sequences
            added_s = cost.per_token_s * num_sequences + cost.per_pair_s * pairs
            plan.extra_s[index] = (1.5 * added_s + 0.5 * cost.constant_s) if num_sequences else 0.0

    def _score(
        self, node: int, task: Task, now: float, gap_s: float, forwards: Sequence[float]
    ) -> tuple[float, float, float, float, float]:
        """Score, response time, idle time, profit and consistency."""
        rules = self.rules
        idle_s, response_s = self.plans[node].look(now, forwards)
        profit_s = -max(idle_s / len(forwards) - gap_s, rules.idle_tolerance_s)
        fit = self._lengths[node].consistency(task.prompt_tokens)
        score_s = profit_s + rules.consistency_s * fit - rules.response_weight * response_s
        if self.plans[node].extra_s[0]:
            score_s += rules.slo_s  # its passes read the weights for the sequences that it decodes anyway
        return score_s, response_s, idle_s, profit_s, fit

    def _choose(self, scores: Sequence[tuple[float, float, float, float, float]]) -> int:
        least_s = min(response_s for _, response_s, *_ in scores)
        within_s = self.within_s(least_s)
        best, best_score = 0, -math.inf
        for node, (score_s, response_s, *_) in enumerate(scores):
            if response_s <= within_s and score_s > best_score:
                best, best_score = node, score_s
        return best

    def within_s(self, least_s: float) -> float:
        """Returns the response time up to which scores decide, if the fastest node answers after
        `least_s`."""
        rules = self.rules
        return max(rules.fill_share * rules.slo_s, least_s + _AS_FAST * rules.slo_s)
