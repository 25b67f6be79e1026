"""What a demo run consists of: options, sizes and durations.

Owns every number of the demo. Pure; reads the machine's CPU count and nothing else.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from rose.demo.records import PhaseName
from rose.measure.models import ROLLOUT_SPEC, SERVING_SPEC
from rose.measure.rig import CpuPlan, PoolSetup
from rose.measure.windows import RolloutTraffic, ServingLoad, Traffic

SERVING_LOAD = ServingLoad(
    rate_rps=1.6,
    burst_size=2,
    max_prompt_tokens=128,
    max_output_tokens=32,
    vocab_size=SERVING_SPEC.vocab_size,
    drain_s=8.0,
)
"""Keeps serving busy for a fifth of the time on an AMD EPYC without AVX-512."""
ROLLOUT_TRAFFIC = RolloutTraffic(concurrency=12, vocab_size=ROLLOUT_SPEC.vocab_size)

POOL = PoolSetup(num_slabs=32, slab_bytes=768 << 10, headroom_slabs=8)
"""A slab holds one block of the serving model or 6 of the rollout model, and nothing else; so few slabs that
two bursts of serving at once eat into the headroom."""

AZURE_TRACE = Path("../shared/traces/AzureLLMInferenceTrace_conv.csv")
"""Used where it is; otherwise a generated trace of the same burst shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What a user may choose; the command's help says what each means."""

    out_dir: Path
    quick: bool = False
    seed: int = 0
    trace: Path | None = None
    relay: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of each part; the whole demo stays within ten minutes on two cores."""

    rollout_alone_s: float
    window_s: float
    """The length of each window with serving traffic."""
    training_windows: int
    """The training window plays the sample of the other windows this many times."""

    def of(self, name: PhaseName) -> float:
        """Returns the length of a phase's window."""
        if name is PhaseName.ROLLOUT_ALONE:
            return self.rollout_alone_s
        return self.window_s * (self.training_windows if name is PhaseName.TRAINING else 1)


QUICK = Durations(rollout_alone_s=10, window_s=14, training_windows=5)
WHOLE = Durations(rollout_alone_s=12, window_s=16, training_windows=19)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """Everything the orchestration needs to know."""

    options: DemoOptions
    durations: Durations
    cpus: CpuPlan
    pool: PoolSetup
    serving: ServingLoad = SERVING_LOAD
    rollout: RolloutTraffic = ROLLOUT_TRAFFIC

    @classmethod
    def of(cls, options: DemoOptions) -> "DemoPlan":
        durations = QUICK if options.quick else WHOLE
        return cls(options=options, durations=durations, cpus=CpuPlan.choose(), pool=POOL)

    @property
    def pool_name(self) -> str:
        """Returns the name of this process's own pool."""
        return f"demo-{os.getpid()}"

    @property
    def traffic(self) -> Traffic:
        """Returns what the windows send."""
        trace = self.options.trace or (AZURE_TRACE if AZURE_TRACE.is_file() else None)
        return Traffic(serving=self.serving, rollout=self.rollout, trace=trace, seed=self.options.seed)
