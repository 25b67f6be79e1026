"""What a demo run leaves behind: plain records that the figures and the report are computed from.

Owns the records' shapes. Promises that all times are seconds on CLOCK_MONOTONIC, which every process of a
host shares. Never measures or judges.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rose.measure.records import Window
from rose.measure.slabs import SlabEvent, SlabSample


class PhaseName(StrEnum):
    """The measured phases of the demo, each in one window; `rose.demo.run.ORDER` says what they are."""

    SERVING_ALONE = "serving_alone"
    ROLLOUT_ALONE = "rollout_alone"
    STATIC = "static_split"
    NAIVE = "naive"
    ALTERNATE = "alternate"
    ROSE = "rose"
    TRAINING = "training"


UNDER_ROSE = (PhaseName.ROSE, PhaseName.TRAINING)
"""The phases in which ROSE guards serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """One optimizer step with the publish of its weights: a line of the trainer's log."""

    step: int
    reward_mean: float
    success_share: float
    num_tokens: int
    version: str
    num_changed: int
    wire_bytes: int
    coo_bytes: int
    dense_bytes: int
    state_hash: str
    """The hash of the published weights."""
    engine_hashes: Sequence[str]
    """The hashes of the weights that the rollout engines then ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Everything one demo run measured."""

    is_quick: bool
    phases: tuple[Window, ...]
    steps: tuple[TrainingStep, ...] = ()
    slab_samples: tuple[SlabSample, ...] = ()
    slab_events: tuple[SlabEvent, ...] = ()
    greedy_compared: int = 0
    """Serving outputs compared with stock vLLM's greedy output for the same prompt."""
    greedy_equal: int = 0
    wall_s: float = 0.0
    notes: tuple[str, ...] = ()

    def windows(self, *names: PhaseName) -> tuple[Window, ...]:
        """Returns the windows of these phases, in the order they ran."""
        return tuple(phase for phase in self.phases if phase.name in names)
