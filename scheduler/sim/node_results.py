"""What a simulation of nodes is given and gives: a policy, the nodes' conditions, every task's end."""

import math
from dataclasses import dataclass, field
from typing import Protocol

from rose.scheduler.node.batching import BatchLimits
from rose.scheduler.node.memory import WaitOrDrop
from rose.scheduler.node.model import Task
from rose.types import Assignment


class TaskPolicy(Protocol):
    """What the simulation asks and tells; `NodePolicy` is the shipped one."""

    def place(self, task: Task, now: float) -> Assignment | None: ...

    def ask_order(self, now: float) -> list[int]: ...

    def pull(self, node: int, now: float) -> Task | None: ...

    def forward_ended(self, node: int, task: Task, stage: int, now: float) -> None: ...

    def backward_ended(self, node: int, task: Task, stage: int, now: float) -> None: ...

    def observe(self, node: int, stage: int, tokens: float, pairs: float, seconds: float) -> None: ...

    def decoding(self, node: int, num_sequences: int, context_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How the simulated nodes behave."""

    give_way_s: float = math.inf
    """Training stops within this time when a request is due; infinite: stages take what was ready first."""
    decision_s: float = 0.0
    """From a task's arrival to its node."""
    noise: float = 0.05
    """Deviation of the logarithm of each task's times."""
    batch: BatchLimits = field(default_factory=BatchLimits)
    memory: WaitOrDrop | None = field(default_factory=lambda: WaitOrDrop(max_wait_s=0.2))
    """None: memory is never checked, and what is too much is swapped in every pass."""
    link_bytes_per_s: float = 20e9
    """Between a device and its host."""


@dataclass(slots=True, kw_only=True, eq=False)
class InferenceTask:
    """An inference task and what became of it."""

    task: Task
    node: int
    ready_s: float
    first_s: float = math.inf
    end_s: float = math.inf
    num_made: int = 0
    is_offloaded: bool = False
    has_alarm: bool = False
    """Whether it is looked at again when it will have waited for memory for long enough."""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.task.arrival_s

    @property
    def context_tokens(self) -> int:
        return self.task.prompt_tokens + self.num_made


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A training task that is done."""

    task: Task
    node: int
    end_s: float


@dataclass(slots=True, kw_only=True)
class NodeResult:
    """What happened. Requests that were refused have infinite times."""

    requests: list[InferenceTask]
    trained: list[Trained]
    duration_s: float
    busy_s: list[float]
    """The busy seconds of each node, over all its stages."""
    num_offloads: int
    num_refused: int

    @property
    def throughput(self) -> float:
        """Tasks done per second, from the first arrival to the last end."""
        num_served = sum(request.end_s < math.inf for request in self.requests)
        return (num_served + len(self.trained)) / self.duration_s if self.duration_s else 0.0

    @property
    def num_nodes_used(self) -> int:
        return sum(busy_s > 0 for busy_s in self.busy_s)

    def attainment(self, slo_s: float) -> float:
        """Share of the requests whose first token came within the SLO; 1 without requests."""
        kept = sum(request.ttft_s <= slo_s for request in self.requests)
        return kept / len(self.requests) if self.requests else 1.0
