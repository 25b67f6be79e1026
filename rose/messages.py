"""The pydantic bodies that cross a process between an engine, its router and its subscriber.

Never used per token or per step.
"""

from pydantic import BaseModel, ConfigDict, Field

from rose.types import GateMode, Role


class GateStatus(BaseModel):
    """What the compute gate of an engine does."""

    mode: GateMode
    admitted_steps: int
    declined_steps: int


class WorkerStatus(BaseModel):
    """Answer of ``GET /rose/v1/status``; counters since the engine started."""

    role: Role
    model: str
    engine_id: str
    weight_version: str | None
    steps: int
    num_running: int
    num_waiting: int
    kv_slabs_owned: int
    kv_slabs_in_use: int
    kv_slabs_budget: int
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


class RlStep(BaseModel):
    """Body of ``POST /rose/v1/rl_step``: the trainer's step number; ends a freeze (ROSE §4.1)."""

    model_config = ConfigDict(extra="forbid")
    step: int = Field(ge=0)


class GateChange(BaseModel):
    """Body of ``POST /rose/v1/gate``."""

    model_config = ConfigDict(extra="forbid")
    mode: GateMode


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


class Profile(BaseModel):
    """Answer of ``POST /rose/v1/profile``: the fitted step-time model, in seconds."""

    file: str
    model: dict[str, float]
