"""The nouns that every part shares."""

from dataclasses import dataclass
from enum import StrEnum

BytesLike = bytes | memoryview
"""Bytes, or a view of bytes in memory that belongs to somebody else."""


class Role(StrEnum):
    """What an engine on a shared GPU is for."""

    SERVING = "serving"
    ROLLOUT = "rollout"


MAX_ENGINES = {Role.SERVING: 4, Role.ROLLOUT: 8}
"""The most engines of each role that share a GPU. Training guests count as rollout engines."""


class StopReason(StrEnum):
    """Why ROSE ended a request early: the ``stop_reason`` beside the finish reason ``abort``."""

    RECLAIMED = "rose_reclaimed"
    """Its KV slabs went back to serving (ROSE §4.1, emergency cut)."""
    STALLED = "rose_stall"
    """No token progress for the stall timeout while serving held the GPU (ROSE §4.1)."""
    DEACTIVATED = "rose_deactivated"
    """The engine has given back its weights and KV until the next rollout phase."""


class GateMode(StrEnum):
    """The test that a rollout step must pass."""

    DUAL = "dual"
    """Spends slack: no step while a serving request waits for its first token; else the TPOT deadline."""
    TTFT_ONLY = "ttft-only"
    TPOT_ONLY = "tpot-only"
    IDLE = "idle"
    """Serving's default: steps only while it has no work at all."""
    ALTERNATE = "alternate"
    """One rollout step for each serving step, without equations: the strong baseline."""
    EQUATIONS = "equations"
    """ROSE §4.1 equations 1 and 2 as printed: any positive slack admits a whole chunk."""
    OFF = "off"
    """Naive co-location: no gate and no grants."""


class Deployment(StrEnum):
    """Which phases of its requests a serving engine computes; a rollout engine computes both."""

    COLLOCATED = "collocated"
    """Both phases: at each step the smaller of TTFT and TPOT slack counts (ROSE §4.3)."""
    PREFILL = "prefill"
    """Prompts, whose KV a decoder takes over: TTFT slack alone counts (ROSE §4.1 eq. 1)."""
    DECODE = "decode"
    """Tokens, from a prefiller's KV: TPOT slack alone counts (ROSE §4.1 eq. 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Latency objectives of a serving deployment, in seconds."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        if self.ttft_s <= 0 or self.tpot_s <= 0:
            raise ValueError(f"SLOs must be positive, got ttft_s={self.ttft_s} tpot_s={self.tpot_s}")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class WeightVersion:
    """A published set of weights: the trainer's run, and a number that grows by one with each."""

    run_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The node that runs a task, and when the task is expected to end."""

    where: int
    """The node's number."""
    finish_s: float
