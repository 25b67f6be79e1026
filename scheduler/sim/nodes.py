"""Nodes that serve and train: tasks arrive, passes run through stages, memory fills. SIMULATED.

Owns simulated time, and the nodes' queues and memory. The policy decides, and sees what a node would report.
The same input gives the same result.

A stage runs one pass at a time. If training gives way, it is stopped for requests; otherwise a stage takes
what was ready first, as LeMix's threads do. The node's tightest stage decides whether memory suffices.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rose.scheduler.node.memory import MemoryVerdict
from rose.scheduler.node.model import NodeProfile, Task
from rose.scheduler.sim.node_results import Conditions, InferenceTask, NodeResult, TaskPolicy, Trained

_LATE_S = 1e-6
"""Behind a limit, whatever the rounding."""
RESUME_S = 0.0005
"""What it costs to go on with a training pass that gave way. An assumption."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Pass:
    """A batch of requests, or a training task, on its way through the stages."""

    ready_s: float
    prefills: list[InferenceTask] = field(default_factory=list)
    decodes: list[InferenceTask] = field(default_factory=list)
    training: Task | None = None
    is_backward: bool = False
    tokens: float = 0
    pairs: float = 0
    extra_s: float = 0.0
    """For copies from or to the host, on the first stage."""
    left_s: float | None = None
    """What was left of a training pass that gave way."""


class _Node:
    """Queues and memory of one node."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.index = index
        self.waiting: list[InferenceTask] = []
        self.decoding: list[InferenceTask] = []
        self.decode_ready_s = 0.0
        self.training: list[tuple[float, Task]] = []
        self.requests: list[list[_Pass]] = [[] for _ in range(num_stages)]
        self.guests: list[list[_Pass]] = [[] for _ in range(num_stages)]
        self.is_busy = [False] * num_stages
        self.busy_s = 0.0
        self.used_bytes = 0
        self.active: dict[int, InferenceTask] = {}
        """Requests that are being decoded, by task."""

    def request_ready_s(self, stage: int) -> float:
        if stage:
            return self.requests[stage][0].ready_s if self.requests[stage] else math.inf
        waiting_s = self.waiting[0].ready_s if self.waiting else math.inf
        return min(waiting_s, self.decode_ready_s if self.decoding else math.inf)

    def guest_ready_s(self, stage: int) -> float:
        ready_s = self.guests[stage][0].ready_s if self.guests[stage] else math.inf
        return min(ready_s, self.training[0][0]) if not stage and self.training else ready_s


class NodeSimulation:
    """One run of a policy over tasks."""

    def __init__(
        self,
        tasks: Sequence[Task],
        policy: TaskPolicy,
        profile: NodeProfile,
        num_nodes: int,
        conditions: Conditions,
        seed: int = 0,
    ) -> None:
        """`profile`: what passes really take; the policy has its own."""
        self._policy, self._profile, self._conditions = policy, profile, conditions
        self._num_stages = len(profile.stages)
        self._nodes = [_Node(index, self._num_stages) for index in range(num_nodes)]
        self._tightest = min(profile.stages, key=lambda stage: stage.free_bytes / stage.kv_token_bytes)
        chance = random.Random(seed)
        self._factors = {task.number: chance.lognormvariate(0.0, conditions.noise) for task in tasks}
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._now_s = 0.0
        self._first_s = min((task.arrival_s for task in tasks), default=0.0)
        self._result = NodeResult(
            requests=[], trained=[], duration_s=0.0, busy_s=[], num_offloads=0, num_refused=0
        )
        for task in tasks:
            self._at(task.arrival_s + conditions.decision_s, lambda task=task: self._arrive(task))  # type: ignore[misc]

    def run(self) -> NodeResult:
        """Plays all events until every task is done or refused."""
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        self._result.duration_s = self._now_s - self._first_s
        self._result.busy_s = [node.busy_s for node in self._nodes]
        return self._result

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _arrive(self, task: Task) -> None:
        if self._is_too_large(task):
            self._result.num_refused += 1
            if not task.is_training:
                self._result.requests.append(InferenceTask(task=task, node=-1, ready_s=self._now_s))
            return
        assignment = self._policy.place(task, self._now_s)
        if assignment is None:
            for index in self._policy.ask_order(self._now_s):
                self._start(self._nodes[index], 0)
            return
        node = self._nodes[assignment.where]
        if task.is_training:
            node.training.append((self._now_s, task))
        else:
            request = InferenceTask(task=task, node=node.index, ready_s=self._now_s)
            self._result.requests.append(request)
            node.waiting.append(request)
        self._start(node, 0)

    # Passes ---------------------------------------------------------------------------------------------

    def _start(self, node: _Node, stage: int) -> None:
        """Starts what the stage should run now, if it is free."""
        if node.is_busy[stage] or (one := self._next(node, stage)) is None:
            return
        seconds = one.left_s if one.left_s is not None else self._seconds(node, stage, one)
        piece_s = min(seconds, self._conditions.give_way_s) if one.training is not None else seconds
        left_s = seconds - piece_s
        one.left_s = left_s if left_s > 0 else None
        node.is_busy[stage] = True
        self._at(self._now_s + piece_s, lambda: self._end(node, stage, one, piece_s))

    def _next(self, node: _Node, stage: int) -> _Pass | None:
        """Requests first where training gives way, else what was ready first; the other if memory says no."""
        request_s, guest_s = node.request_ready_s(stage), node.guest_ready_s(stage)
        choices = [self._next_guest, self._next_request]
        if request_s < math.inf and (self._conditions.give_way_s < math.inf or request_s <= guest_s):
            choices.reverse()
        one = choices[0](node, stage)
        return one if one is not None else choices[1](node, stage)

    def _next_request(self, node: _Node, stage: int) -> _Pass | None:
        if not stage:
            return self._batch(node)
        return node.requests[stage].pop(0) if node.requests[stage] else None

    def _next_guest(self, node: _Node, stage: int) -> _Pass | None:
        if node.guests[stage]:
            return node.guests[stage].pop(0)
        if stage:
            return None
        if not node.training and not node.waiting:
            task = self._policy.pull(node.index, self._now_s)
            if task is not None:
                node.training.append((self._now_s, task))
        return self._begin_training(node)

    def _batch(self, node: _Node) -> _Pass | None:
        """The next pass of requests: what is being decoded, and waiting requests that memory allows."""
        count = self._conditions.batch.take(request.task.prompt_tokens for request in node.waiting)
        one = _Pass(ready_s=self._now_s)
        self._decode(node, one)
        while count and self._admit(node, node.waiting[0], one):
            one.prefills.append(node.waiting.pop(0))
            count -= 1
        node.used_bytes += len(one.decodes) * self._tightest.kv_token_bytes
        one.tokens = len(one.decodes) + sum(each.task.prompt_tokens for each in one.prefills)
        one.pairs = sum(2 * each.context_tokens + 1 for each in one.decodes)
        one.pairs += sum(each.task.prompt_tokens**2 for each in one.prefills)
        return one if one.prefills or one.decodes else None

    def _decode(self, node: _Node, one: _Pass) -> None:
        """Puts sequences into the pass: those on the device, and offloaded ones that fit again."""
        sequences, node.decoding = node.decoding, []
        for each in sequences:
            if each.is_offloaded:
                if (
                    node.used_bytes
                    and self._verdict(node, self._kv_bytes(each), math.inf) is not MemoryVerdict.RUN
                ):
                    node.decoding.append(each)
                    continue
                each.is_offloaded = False
                node.used_bytes += self._kv_bytes(each)
                one.extra_s += self._kv_bytes(each) / self._conditions.link_bytes_per_s
            one.decodes.append(each)
        if self._conditions.memory is not None:
            growth = self._tightest.kv_token_bytes
            while (
                len(one.decodes) > 1
                and node.used_bytes + growth * len(one.decodes) > self._tightest.free_bytes
            ):
                self._offload(node, one)

    def _begin_training(self, node: _Node) -> _Pass | None:
        if not node.training:
            return None
        ready_s, task = node.training[0]
        need_bytes = task.prompt_tokens * self._tightest.activation_token_bytes
        if self._verdict(node, need_bytes, ready_s) is not MemoryVerdict.RUN:
            return None  # the passes that hold the memory will end
        node.training.pop(0)
        node.used_bytes += need_bytes
        tokens = task.prompt_tokens
        return _Pass(ready_s=self._now_s, training=task, tokens=tokens, pairs=tokens**2)

    def _seconds(self, node: _Node, stage: int, one: _Pass) -> float:
        costs = self._profile.stages[stage]
        cost = costs.backward if one.is_backward else costs.forward
        numbers = [request.task.number for request in one.prefills]
        if one.training is not None:
            numbers.append(one.training.number)
        factor = sum(self._factors[number] for number in numbers) / len(numbers) if numbers else 1.0
        seconds = cost.seconds(one.tokens, one.pairs) * factor
        if self._conditions.memory is None:
            too_much = max(0, node.used_bytes - self._tightest.free_bytes)
            seconds += 2 * too_much / self._conditions.link_bytes_per_s
        return seconds + (one.extra_s if not stage else 0.0)

    def _end(self, node: _Node, stage: int, one: _Pass, seconds: float) -> None:
        node.is_busy[stage] = False
        node.busy_s += seconds
        if one.left_s is not None:
            if node.request_ready_s(stage) < math.inf:
                one.left_s += RESUME_S
            node.guests[stage].insert(0, one)
            self._start(node, stage)
            return
        one.ready_s = self._now_s
        then = (
            self._training_ended(node, stage, one)
            if one.training
            else self._requests_ended(node, stage, one, seconds)
        )
        if then is not None:
            self._start(node, then)
        self._start(node, stage)
        self._start(node, 0)

    def _training_ended(self, node: _Node, stage: int, one: _Pass) -> int | None:
        """A training task's pass on a stage is over; returns the stage that it goes to."""
        task = one.training
        assert task is not None
        if not one.is_backward:
            self._policy.forward_ended(node.index, task, stage, self._now_s)
            one.is_backward = stage == self._num_stages - 1
            then = stage if one.is_backward else stage + 1
        else:
            self._policy.backward_ended(node.index, task, stage, self._now_s)
            then = stage - 1
        if then < 0:
            node.used_bytes -= task.prompt_tokens * self._tightest.activation_token_bytes
            self._result.trained.append(Trained(task=task, node=node.index, end_s=self._now_s))
            return None
        node.guests[then].append(one)
        return then

    def _requests_ended(self, node: _Node, stage: int, one: _Pass, seconds: float) -> int | None:
        for request in one.prefills:
            self._policy.forward_ended(node.index, request.task, stage, self._now_s)
        self._policy.observe(node.index, stage, one.tokens, one.pairs, seconds)
        if stage < self._num_stages - 1:
            node.requests[stage + 1].append(one)
            return stage + 1
        for request in (*one.prefills, *one.decodes):
            request.num_made += 1
            request.first_s = min(request.first_s, self._now_s)
            if request.num_made < request.task.output_tokens:
                node.decoding.append(request)
                node.active[request.task.number] = request
            else:
                request.end_s = self._now_s
                node.used_bytes -= self._kv_bytes(request)
                node.active.pop(request.task.number, None)
        node.decode_ready_s = self._now_s
        contexts = sum(request.context_tokens for request in node.active.values())
        self._policy.decoding(node.index, len(node.active), contexts)
        return None

    # Memory ---------------------------------------------------------------------------------------------

    def _kv_bytes(self, request: InferenceTask) -> int:
        """The last token that was made has no KV before its pass."""
        tokens = request.task.prompt_tokens + max(0, request.num_made - 1)
        return tokens * self._tightest.kv_token_bytes

    def _is_too_large(self, task: Task) -> bool:
        stage = self._tightest
        token_bytes = stage.activation_token_bytes if task.is_training else stage.kv_token_bytes
        rule = self._conditions.memory
        tokens = task.prompt_tokens + (0 if task.is_training else task.output_tokens)
        return rule is not None and tokens * token_bytes > rule.threshold * stage.free_bytes

    def _verdict(self, node: _Node, need_bytes: int, ready_s: float) -> MemoryVerdict:
        rule = self._conditions.memory
        if rule is None:
            return MemoryVerdict.RUN
        return rule.decide(
            need_bytes=need_bytes,
            used_bytes=node.used_bytes,
            total_bytes=self._tightest.free_bytes,
            waited_s=self._now_s - ready_s,
        )

    def _admit(self, node: _Node, request: InferenceTask, one: _Pass) -> bool:
        """Gives a waiting request its memory if it may have it now; after T_max, that of the youngest."""
        need_bytes = self._kv_bytes(request)
        verdict = self._verdict(node, need_bytes, request.ready_s)
        while verdict is MemoryVerdict.OFFLOAD and one.decodes:
            self._offload(node, one)
            verdict = self._verdict(node, need_bytes, request.ready_s)
        if verdict is MemoryVerdict.WAIT and self._conditions.memory is not None and not request.has_alarm:
            request.has_alarm = True
            alarm_s = request.ready_s + self._conditions.memory.max_wait_s + _LATE_S
            self._at(alarm_s, lambda: self._start(node, 0))
        if verdict is MemoryVerdict.RUN:
            node.used_bytes += need_bytes
        return verdict is MemoryVerdict.RUN

    def _offload(self, node: _Node, one: _Pass) -> None:
        """Moves the KV of the pass's youngest sequence to the host."""
        victim = one.decodes.pop()
        victim.is_offloaded = True
        node.decoding.append(victim)
        node.used_bytes -= self._kv_bytes(victim)
        one.extra_s += self._kv_bytes(victim) / self._conditions.link_bytes_per_s
        self._result.num_offloads += 1
