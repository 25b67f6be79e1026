"""What a demo run consists of: options, sizes and durations.

Owns every number of the demo. Pure; reads the machine's CPU count and nothing else.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from rose.demo import frozenlake
from rose.demo.models import SERVING_SPEC
from rose.measure.windows import RolloutTraffic, ServingLoad, Traffic
from rose.types import SLO

DEMO_SLO = SLO(ttft_s=0.6, tpot_s=0.15)
"""Of the serving model on one CPU core; the paper's ratio of TTFT to TPOT is similar (500/150 ms)."""

BURST_SIZE = 6
BURST_PREFILL_S = 0.9
"""Of six of the longest prompts; most prompts of the trace are much shorter."""

SERVING_LOAD = ServingLoad(
    rate_rps=1.3,
    burst_size=3,
    max_prompt_tokens=256,
    max_output_tokens=48,
    vocab_size=SERVING_SPEC.vocab_size,
    drain_s=8.0,
)
ROLLOUT_TRAFFIC = RolloutTraffic(concurrency=12, vocab_size=frozenlake.VOCAB_SIZE)

AZURE_TRACE = Path("../shared/traces/AzureLLMInferenceTrace_conv.csv")
"""Used where it is; otherwise a generated trace of the same burst shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What a user may choose."""

    out_dir: Path
    quick: bool = False
    seed: int = 0
    trace: Path | None = None
    """None: the Azure trace where it lies beside the checkout, else a generated one."""
    relay: str = "auto"
    """"mooncake", "embedded", or "auto": Mooncake where its libraries are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The slab pool. 768 KiB slabs hold one block of the serving model or 6 of the rollout model, and nothing
    else; so small that two bursts of serving at once eat into the headroom."""

    name: str
    num_slabs: int = 32
    slab_bytes: int = 768 << 10
    headroom_slabs: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of each part; the whole demo stays within ten minutes on two cores."""

    rollout_alone_s: float
    window_s: float
    """Of each window with serving traffic."""
    num_rounds: int
    """How often rollouts alone, serving alone, ROSE and naive co-location are measured; alternation once."""
    training_s: float

    @classmethod
    def choose(cls, *, is_quick: bool) -> "Durations":
        if is_quick:
            return cls(rollout_alone_s=12, window_s=24, num_rounds=1, training_s=75)
        return cls(rollout_alone_s=15, window_s=20, num_rounds=2, training_s=180)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPlan:
    """Which CPUs stand for the GPU, and which carry everything else; None: no pinning."""

    compute: str | None
    others: tuple[int, ...] | None

    @classmethod
    def choose(cls) -> "CpuPlan":
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) < 2:
            return cls(compute=None, others=None)
        return cls(compute=str(cpus[0]), others=tuple(cpus[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """Everything the orchestration needs to know."""

    options: DemoOptions
    durations: Durations
    cpus: CpuPlan
    pool: PoolPlan
    slo: SLO = DEMO_SLO
    serving: ServingLoad = SERVING_LOAD
    rollout: RolloutTraffic = ROLLOUT_TRAFFIC

    @classmethod
    def of(cls, options: DemoOptions) -> "DemoPlan":
        return cls(
            options=options,
            durations=Durations.choose(is_quick=options.quick),
            cpus=CpuPlan.choose(),
            pool=PoolPlan(name=f"demo-{os.getpid()}"),
        )

    @property
    def trace(self) -> Path | None:
        """The trace file to replay, or None for the generator."""
        if self.options.trace is not None:
            return self.options.trace
        return AZURE_TRACE if AZURE_TRACE.is_file() else None

    @property
    def traffic(self) -> Traffic:
        """What the windows send."""
        return Traffic(serving=self.serving, rollout=self.rollout, trace=self.trace, seed=self.options.seed)

    @property
    def measured_s(self) -> float:
        """Seconds of all windows together, for the time-left display."""
        durations = self.durations
        window_s = durations.window_s + self.serving.drain_s
        a_round_s = durations.rollout_alone_s + 3 * window_s
        return durations.num_rounds * a_round_s + window_s + durations.training_s


def load_for_machine(prefill_token_s: float) -> ServingLoad:
    """Chooses a load that takes about as long on every machine, given a prompt token's seconds.

    Six prompts come at once. On an AMD EPYC without AVX-512, the P99 of the TTFT is 0.33 s alone, 0.51 s
    where a rollout engine takes half of the compute, and 0.28 s under ROSE.
    """
    num_tokens = round(BURST_PREFILL_S / BURST_SIZE / prefill_token_s)
    return replace(SERVING_LOAD, burst_size=BURST_SIZE, max_prompt_tokens=min(max(num_tokens, 48), 320))
