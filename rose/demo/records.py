"""What a demo run leaves behind: plain records that the figures and the report are computed from.

Owns the records' shapes. Promises that all times are seconds on CLOCK_MONOTONIC, which every process of a
host shares. Never measures or judges.
"""

from dataclasses import dataclass
from enum import StrEnum

from rose.measure.records import Window
from rose.measure.slabs import SlabEvent, SlabSample


class PhaseName(StrEnum):
    """The measured phases of the demo, each in one window."""

    SERVING_ALONE = "serving_alone"
    ROLLOUT_ALONE = "rollout_alone"
    STATIC = "static_split"
    """Each engine has KV memory of its own and half of the GPU's time, in fixed slices."""
    NAIVE = "naive"
    ALTERNATE = "alternate"
    """Strict alternation: a rollout step after each serving step."""
    ROSE = "rose"
    """Harvest under ROSE: the closed-loop rollout load beside the replay."""
    TRAINING = "training"
    """The whole loop under ROSE: trainer, router, weight updates, beside the replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPoint:
    """Mean reward and success share of one training step."""

    step: int
    reward_mean: float
    success: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPoint:
    """Bytes of one weight publish, beside what the same change costs densely and as COO."""

    version: str
    dense_bytes: int
    coo_bytes: int
    wire_bytes: int
    num_changed: int
    is_base: bool = False
    """True for a full publish, which no delta figure counts."""


UNDER_ROSE = (PhaseName.ROSE, PhaseName.TRAINING)
"""The phases in which ROSE guards serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Everything one demo run measured."""

    is_quick: bool
    phases: tuple[Window, ...]
    rewards: tuple[RewardPoint, ...] = ()
    syncs: tuple[SyncPoint, ...] = ()
    slab_samples: tuple[SlabSample, ...] = ()
    slab_events: tuple[SlabEvent, ...] = ()
    greedy_compared: int = 0
    """Serving outputs compared with stock vLLM's greedy output for the same prompt."""
    greedy_equal: int = 0
    checksums_compared: int = 0
    """Whole-model weight checksums compared between trainer and rollout engines."""
    checksum_mismatches: int = 0
    wall_s: float = 0.0
    notes: tuple[str, ...] = ()

    def windows(self, *names: PhaseName) -> tuple[Window, ...]:
        """The windows of these phases, in the order they ran."""
        return tuple(phase for phase in self.phases if phase.name in names)
