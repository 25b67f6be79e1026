"""What a placement policy sees: the turn, and each worker at this moment.

Owns: TurnView, WorkerView, Wants, Speed, and which workers serve a model.
Promises: plain values, which both the service and the simulator fill in.
Never does: decide, read a clock.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

from rose.types import WeightVersion

NOBODY = ""
"""The `owner` of a serving GPU that no job has borrowed."""
DEFAULT_JOB = "default"
NO_RUN = ""
"""The run of a turn that may have base weights alone."""


AdapterVersions = Mapping[str, WeightVersion]
"""The newest versions of a worker's LoRA adapters, by the model name that turns give them: their run."""
NO_ADAPTERS: AdapterVersions = {}
Contexts = Mapping[str, int | None]
"""Model name -> its context in tokens, None if unknown. The first model is the worker's default."""


def version_for(
    model: str | None, version: WeightVersion | None, adapters: AdapterVersions
) -> WeightVersion | None:
    """Returns the version with which a worker answers a model: its adapter's, or its whole weights'."""
    return adapters.get(model, version) if model is not None else version


class WorkerKind(StrEnum):
    DEDICATED = "dedicated"
    """A GPU that only runs rollouts."""
    SERVING = "serving"
    """The rollout engine on a GPU that serves traffic first."""


class Wants(NamedTuple):
    """What a turn asks of its worker's weights."""

    model: str | None = None
    """None: any will do."""
    run_id: str | None = None
    """The training run; None: any will do."""

    def are_met(
        self,
        models: Collection[str] | None,
        version: WeightVersion | None,
        adapters: AdapterVersions = NO_ADAPTERS,
    ) -> bool:
        """Returns whether a worker that serves `models` with these weights, or with base weights, will do."""
        is_served = self.model is None or models is None or self.model in models
        version = version_for(self.model, version, adapters)
        return is_served and (self.run_id is None or version is None or version.run_id == self.run_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """A turn as policies see it: one rollout request of a trajectory."""

    session: str
    job: str = DEFAULT_JOB
    model: str | None = None
    """The model it asks for; None: any will do."""
    affine: str | None = None
    """The worker of the session's previous turn, which probably still holds its prefix KV."""
    run_id: str | None = None
    """The training run whose weights it asks for; None: any will do; NO_RUN: base weights alone."""
    pinned_version: WeightVersion | None = None
    avoid_until: Mapping[str, float] = field(default_factory=dict)
    """Workers that just failed, stalled or aborted this turn, and until when it avoids them."""
    least_context: int | None = None
    """The shortest context of a worker that may take the turn, where the model's workers differ in it; None:
    any will do."""
    prompt_tokens: int = 0
    expected_tokens: float = 0.0
    """The number of tokens that it will probably generate."""
    cached_tokens: Mapping[str, float] = field(default_factory=dict)
    """The prompt tokens that each worker probably still holds; other workers hold none."""

    @property
    def wants(self) -> Wants:
        return Wants(self.model, self.run_id)

    def fits(self, contexts: Contexts) -> bool:
        """Returns whether a worker with these contexts may take it."""
        context = contexts.get(self.model) if self.model is not None else None
        return self.least_context is None or context is None or context >= self.least_context

    def missing_tokens(self, worker: str) -> float:
        """Returns the prompt tokens that the worker would have to prefill."""
        return max(0.0, self.prompt_tokens - self.cached_tokens.get(worker, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """An engine's step time on a whole GPU, in seconds."""

    prefill_s_per_token: float
    step_s: float
    """The fixed part of a decode step."""
    step_s_per_turn: float
    """The part that each turn in the batch adds to a decode step."""

    def decode_s(self, num_turns: float) -> float:
        """Returns the time per token with `num_turns` in the batch."""
        return self.step_s + self.step_s_per_turn * num_turns


@dataclass(slots=True, kw_only=True)
class WorkerView:
    """A worker as policies see it; they only read it.

    It is not frozen, because building frozen ones takes five times as long and decisions need one per worker.
    """

    id: str
    kind: WorkerKind
    alive: bool
    in_flight: int
    cap: int
    eligible: bool = True
    """For serving GPUs: the SLO gate admits rollout work, and there is no memory pressure."""
    owner: str | None = None
    """For serving GPUs: the job that has borrowed it, or NOBODY; None: every job may use it."""
    models: Collection[str] | None = None
    """The names of the models that it serves; None: it does not say, and may serve any."""
    contexts: Contexts = field(default_factory=dict)
    """The contexts of its models, as far as it says them."""
    weight_version: WeightVersion | None = None
    adapters: AdapterVersions = field(default_factory=dict)
    awaits_weights: bool = False
    """Whether it has base weights, and may still get the first ones of its run. Turns of runs wait for
    them."""
    load: float = 0.0
    not_before: float = 0.0
    """It gets no turn before this time, because it failed or stalled one."""
    share: float | None = None
    """The share of the GPU's time that rollouts can get; None: unknown."""
    share_until: float = float("inf")
    """The time from which on the share is stale."""
    speed: Speed | None = None
    """None: too few turns have run yet."""
    pending_prefill_tokens: float = 0.0
    """The prompt tokens of turns on it that still wait for their first token."""

    @property
    def has_room(self) -> bool:
        return self.alive and self.in_flight < self.cap


class _SaysModels(Protocol):
    @property
    def models(self) -> Collection[str] | None: ...


_SomeWorker = TypeVar("_SomeWorker", bound=_SaysModels)


def of_model(model: str | None, workers: Sequence[_SomeWorker]) -> Sequence[_SomeWorker]:
    """Returns the workers that may serve the model, or all workers if `model` is None."""
    if model is None:
        return workers
    return [w for w in workers if w.models is None or model in w.models]
