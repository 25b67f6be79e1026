"""The pydantic bodies that cross a process between an engine, its router and its subscriber.

Never used per token or per step.
"""

from pydantic import BaseModel, ConfigDict, Field

from rose.types import Deployment, GateMode, Role


class GateStatus(BaseModel):
    """What the compute gate of an engine does."""

    mode: GateMode
    tpot_target_ms: float | None = None
    """Of the last change; None: as the engine was started."""
    admitted_steps: int
    declined_steps: int


class WorkerStatus(BaseModel):
    """Answer of ``GET /rose/v1/status``; counters since the engine started."""

    role: Role
    deployment: Deployment | None = None
    """Of a serving engine: which phases of its requests it computes."""
    model: str
    engine_id: str
    weight_version: str | None
    steps: int
    num_running: int
    num_waiting: int
    kv_slabs_owned: int
    kv_slabs_in_use: int
    kv_slabs_budget: int
    pool_slabs_quarantined: int = 0
    """Of engines of the same pool that died: free once the last of their processes has ended."""
    kv_cached_blocks: int
    kv_live_blocks: int
    """Blocks in use or holding prefix cache; with the slabs owned it says how well memory is used."""
    pressure: str
    """normal, pressure or frozen (ROSE §4.1)."""
    gate: GateStatus
    stalled_requests: int
    reclaimed_requests: int
    leases_expired: int
    cuts: int
    generated_tokens: int
    busy_s: float
    serving_busy_s: float | None = None
    """Seconds that serving's steps took on the shared GPU since the pool began; None without a pool."""
    serving_kv_usage: float | None = None
    """Serving's part of the pool's slabs, 0 to 1."""
    is_active: bool
    """Whether the weights are on the device; an inactive engine refuses turns with 503."""
    is_updating: bool = False
    """Between two versions of the weights: no step runs, which is no stall."""
    activated_at_s: float
    """Unix time of the last activation, or of the start."""
    device_weights_bytes: int
    device_kv_bytes: int
    """Of the slabs it owns; without a pool vLLM's own cache counts under fixed."""
    device_fixed_bytes: int
    """All else that it holds on the device. On a CPU: the rest of the engine core's anonymous memory."""


class RlStep(BaseModel):
    """Body of ``POST /rose/v1/rl_step``: the trainer's step number; ends a freeze (ROSE §4.1)."""

    model_config = ConfigDict(extra="forbid")
    step: int = Field(ge=0)


class GateChange(BaseModel):
    """Body of ``POST /rose/v1/gate``."""

    model_config = ConfigDict(extra="forbid")
    mode: GateMode
    tpot_target_ms: float | None = Field(default=None, gt=0)
    """What the gate aims at per serving token, within the SLO; None: as the engine was started."""


class WeightUpdate(BaseModel):
    """Body of ``POST /rose/v1/weights``: a checkpoint staged on the engine's host."""

    model_config = ConfigDict(extra="forbid")
    version: str
    path: str
    state_hash: str


class WeightUpdated(BaseModel):
    """Answer of ``POST /rose/v1/weights`` once the engine serves the version."""

    version: str
    state_hash: str


class ActivationChange(BaseModel):
    """Answer of ``POST /rose/v1/activate`` and ``/rose/v1/deactivate``."""

    is_active: bool
    took_s: float
    """0 where nothing had to change."""


class Profile(BaseModel):
    """Answer of ``POST /rose/v1/profile``: the fitted step-time model, in seconds."""

    file: str
    model: dict[str, float]
    observations: list[tuple[int, int, int, float]]
    """Of each step: prefill tokens, decodes, their context tokens, seconds."""


class ConcurrencyPoint(BaseModel):
    """Rollout throughput at one number of concurrent turns."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    concurrency: int = Field(ge=1)
    tokens_per_s: float = Field(ge=0)


class ConcurrencyProfile(BaseModel):
    """What ``rose profile --concurrency`` stores, and a router's cap is read from."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    model: str
    context_tokens: int
    """Of each turn's prompt."""
    new_tokens: int
    gpus: int = Field(ge=1)
    """Of the engine that was measured."""
    points: tuple[ConcurrencyPoint, ...]
    cap: int = Field(ge=1)
    """Concurrent turns on the whole engine."""
    turns_per_gpu: int = Field(ge=1)
