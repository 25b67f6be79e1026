"""What a placement policy sees: the turn, and each worker at this moment.

Owns: TurnView, WorkerView, Speed, who serves a model, and the protocol of a policy.
Promises: plain values that both the service and the simulator fill in.
Never does: decide, or read a clock.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeVar

from rose.types import WeightVersion

NOBODY = ""
"""`owner` of a serving GPU that no job has borrowed."""
DEFAULT_JOB = "default"


class WorkerKind(StrEnum):
    DEDICATED = "dedicated"
    """A GPU that only runs rollouts."""
    SERVING = "serving"
    """The rollout engine on a GPU that serves traffic first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One request for generation within a trajectory."""

    session: str
    job: str = DEFAULT_JOB
    model: str | None = None
    """Only workers that serve it; None: any will do."""
    affine: str | None = None
    """The worker that ran the session's previous turn and most likely still holds its prefix KV."""
    run_id: str | None = None
    """Only weights of this training run; None: of any."""
    pinned_version: WeightVersion | None = None
    avoid_until: Mapping[str, float] = field(default_factory=dict)
    """Workers that just failed, stalled or aborted this very turn: none of them before the given time."""
    prompt_tokens: int = 0
    expected_tokens: float = 0.0
    """Tokens that it will probably generate."""
    cached_tokens: Mapping[str, float] = field(default_factory=dict)
    """Prompt tokens that each worker probably still holds; workers that are not named hold none."""

    def missing_tokens(self, worker: str) -> float:
        """Prompt tokens that the worker would have to prefill."""
        return max(0.0, self.prompt_tokens - self.cached_tokens.get(worker, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """An engine's step time on a whole GPU, in seconds."""

    prefill_s_per_token: float
    step_s: float
    """A decode step's fixed part."""
    step_s_per_turn: float
    """What each turn in the batch adds to it."""

    def decode_s(self, num_turns: float) -> float:
        """Time per token with so many turns in the batch."""
        return self.step_s + self.step_s_per_turn * num_turns


@dataclass(slots=True, kw_only=True)
class WorkerView:
    """What the policy may know about a worker. Policies only read it.

    Not frozen: that makes building one five times as dear, and every decision needs one per worker.
    """

    id: str
    kind: WorkerKind
    alive: bool
    in_flight: int
    cap: int
    eligible: bool = True
    """Serving GPUs: the SLO gate admits rollout work and no memory pressure is on."""
    owner: str | None = None
    """Serving GPUs: the one job that has borrowed it, or NOBODY. None: open to every job."""
    models: Collection[str] | None = None
    """Names of those that it serves; None: it does not say, and may serve any."""
    weight_version: WeightVersion | None = None
    load: float = 0.0
    not_before: float = 0.0
    """It failed or stalled a turn: none for it before this time."""
    share: float | None = None
    """Of the GPU's time, what rollouts can get; None: not known."""
    share_until: float = float("inf")
    """From this time on the share is stale."""
    speed: Speed | None = None
    """None: not enough seen yet."""
    pending_prefill_tokens: float = 0.0
    """Of turns on it that still wait for their first token."""

    @property
    def has_room(self) -> bool:
        return self.alive and self.in_flight < self.cap


class _SaysModels(Protocol):
    @property
    def models(self) -> Collection[str] | None: ...


_SomeWorker = TypeVar("_SomeWorker", bound=_SaysModels)


def of_model(model: str | None, workers: Sequence[_SomeWorker]) -> Sequence[_SomeWorker]:
    """The workers that serve it, or don't say what they serve. `model`: None: any will do."""
    if model is None:
        return workers
    return [w for w in workers if w.models is None or model in w.models]


class Policy(Protocol):
    def pick(self, turn: TurnView, workers: Sequence[WorkerView], now: float) -> str | None:
        """The worker for this turn; None: queue it.

        Raises:
            VersionGone: no registered worker can ever take it.
        """

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        """Turns that are alike can be placed or none of them can: saves asking for each one in a queue."""
