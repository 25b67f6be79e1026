"""Calibrates the simulation of whole RL jobs: every number that is put in, and its source.

Owns the workloads of ROSE §2.2 and §6 and the constants of its baselines. Both overheads of Figure 8b are
inputs; no other number in this file comes from a result of ROSE §6. Numbers that no paper states are marked
"assumed", and err in a baseline's favour.

Step times, tokens per turn and environment times of the rollout engines are those of sim/rollout/scenario.py,
which were fitted to Table 3 and Figure 14 with other trajectories. The number of turns is fitted here, to
what ROSE §2.2 and §4.1 say of the trajectories. Serving engines and their traffic are those of sim/twin, from
the hardware's data sheet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.rollout.scenario import QWEN3_8B as SCENARIO_8B
from sim.rollout.scenario import QWEN3_32B as SCENARIO_32B
from sim.rollout.scenario import Lognormal, Scenario
from sim.twin.pairs import HEAD_BYTES, PAIR_8B, PAIR_32B, QWEN3_8B, QWEN3_32B, ModelSize, Pair
from sim.twin.traffic import RATES_RPS

TRAIN_PASSES = 5
"""What a training phase costs, in forward passes: a forward pass, a backward pass (2), and the old and the
reference policy's log-probabilities (GRPO with a reference model)."""
TRAIN_FLOPS_PER_S = 0.45 * 989e12
"""A training GPU's arithmetic: the utilization that Megatron-LM's README reports for 13B on H100 (41% for 2B,
47% for 175B). ROSE trains with Megatron-LM (§5) and reports no utilization."""
MAX_SAMPLING = 5.7
"""The most trajectories of a DAPO step over the batch (ROSE Figure 1d). Steps are drawn log-uniformly from 1
to that: only the maximum is stated."""
COLD_START_S = 30.0
"""From getting a spot or serverless GPU until its engine answers: "tens of seconds" (ROSE §2.3). Assumed: the
lower end."""
LEASE_S = 900.0
"""The timeout of a serverless function (ROSE §6, baselines)."""
SPOT_OVERHEAD = 0.07
"""GPU time that spot instances lose to recoveries, 6.8 to 7.3% (ROSE Figure 8b); with COLD_START_S it gives
how often the number of spot GPUs changes. The numbers themselves (Figure 13) are only drawn: assumed uniform
from none to the maximum."""
LEASE_RECOVERY_S = 0.261 * LEASE_S
"""What the end of a lease costs: λRL loses up to 26.1% of its GPU time (ROSE Figure 8b). That is of all GPUs;
here it is of the rented ones alone, which is less. With COLD_START_S a lease would lose 3%."""
RELOAD_S = 10.0
"""From a burst until a GPU that autoscaling lent to rollouts serves again; ROSE §3.2 says tens of seconds.
Assumed: ServerlessLLM's loading, at its best."""
CALM_S = 60.0
"""For how long autoscaling must not have needed a GPU before it lends it. Assumed."""
MAX_DENSITY = 3.0
"""Traffic that autoscaling packs on one serving GPU, over the usual: it then computes for two thirds of the
time. Assumed; at 6 it would compute for nine tenths (sim/twin/traffic.py)."""
ACTIVATION_S = 5.0
"""The time that rollout weights take onto a serving GPU, once a job (ROSE §4.1: Qwen3-32B, at most)."""
HEADROOM = 0.2
"""Part of a serving GPU's memory that no rollout takes (ROSE §4.1)."""
GPU_BYTES = 80e9 * 0.9
HEAD_SIZE = 128
INFINIBAND_BYTES_PER_S = 400e9 / 8
"""Within a cluster (ROSE §6, cluster setup)."""
LINK_GBPS = 200.0
"""Between the clusters (ROSE §6, cluster setup)."""
APPLY_S = 1.0
"""Writing new weights into an engine that holds the old ones (ROSE §4.2: at most about 1 s)."""
CHANGED = 0.01
"""Share of elements that an RL step changes: sparsity "around 99%" (ROSE Figure 11a)."""
ENCODE_BYTES_PER_S, DECODE_BYTES_PER_S = 4.4e9, 16.1e9
"""Rates of our codec for dense weights, one core a rank: benchmarks/bench_codec.py (measured on a CPU)."""
PROFILED_GPUS, PROFILED_TRAJECTORIES, PROFILED_GROUP = 16, 256, 8
"""The synchronous job of ROSE §2.2. Assumed: all of its GPUs do rollouts and training in turns."""
MAX_TURNS = 200
"""More than fit into a context: no limit."""
TRANSFER_GPUS = 16
"""GPUs that train in ROSE §6.3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperWorkload:
    """A model, its GPUs and its RL job: ROSE §6, models and training configurations."""

    scenario: Scenario
    pair: Pair
    model: ModelSize
    train_gpus: int
    num_senders: int
    """GPUs that send new weights, also where fewer are simulated."""
    max_spot_gpus: int
    """The most GPUs of the spot trace, and of serverless functions (ROSE §6.1)."""

    @property
    def name(self) -> str:
        return self.scenario.name

    @property
    def rate_rps(self) -> float:
        """Serving requests per engine."""
        return RATES_RPS[self.name]

    @property
    def weight_bytes(self) -> float:
        return 2 * self.model.parameters

    @property
    def pool_tokens(self) -> int:
        """Rollout tokens whose KV fits into what both models' weights leave of a serving engine's memory."""
        free = GPU_BYTES * self.scenario.gpus_per_engine - 2 * self.weight_bytes
        return int(free / (HEAD_BYTES * self.model.layers * self.model.kv_heads))

    @property
    def lent_tokens(self) -> int:
        """The part of these that rollouts may fill."""
        reserved = HEADROOM * 80e9 * self.scenario.gpus_per_engine
        return self.pool_tokens - int(reserved / (HEAD_BYTES * self.model.layers * self.model.kv_heads))

    def train_s(self, lengths: Sequence[int]) -> float:
        """One training phase over sequences of this many tokens, with causal attention."""
        model = self.model
        tokens, pairs = sum(lengths), sum(length * length for length in lengths) / 2
        flops = 2 * model.parameters * tokens + 4 * HEAD_SIZE * model.layers * model.heads * pairs
        return TRAIN_PASSES * flops / (self.train_gpus * TRAIN_FLOPS_PER_S)

    def profiled(self) -> "PaperWorkload":
        """Returns the job of ROSE §2.2, in full size."""
        scenario = replace(
            self.scenario,
            num_dedicated=PROFILED_GPUS // self.scenario.gpus_per_engine,
            num_trajectories=PROFILED_TRAJECTORIES,
            group_size=PROFILED_GROUP,
        )
        return replace(self, scenario=scenario, train_gpus=PROFILED_GPUS)

    @property
    def own_sync_s(self) -> float:
        """New weights on the job's own rollout GPUs, and on those rented beside them."""
        return self.weight_bytes / INFINIBAND_BYTES_PER_S + APPLY_S

    def halved(self) -> "PaperWorkload":
        """Half of all GPUs and trajectories: the same load per engine in half the time to simulate."""
        halves = {
            name: getattr(self.scenario, name) // 2
            for name in ("num_dedicated", "num_serving", "num_trajectories")
        }
        return replace(
            self,
            scenario=replace(self.scenario, **halves),
            train_gpus=self.train_gpus // 2,
            max_spot_gpus=self.max_spot_gpus // 2,
        )


def _trajectories(scenario: Scenario, turns: Lognormal) -> Scenario:
    """Trajectories end by themselves or at the context's limit (32k: ROSE §2.2, §6).

    Their turns were fitted to what the paper says of the job of §2.2: the 75th percentile of their times is
    at most 30% of the phase (§2.2; here about 0.30 and 0.27) and 55 to 145 s, and tails exceed 400 s
    (§4.1)."""
    return replace(scenario, turns=turns, max_turns=MAX_TURNS)


WORKLOAD_8B = PaperWorkload(
    scenario=_trajectories(SCENARIO_8B, Lognormal(mean=6.0, sigma=1.35)),
    pair=PAIR_8B,
    model=QWEN3_8B,
    train_gpus=8,
    num_senders=8,
    max_spot_gpus=16,
)
WORKLOAD_32B = PaperWorkload(
    scenario=_trajectories(SCENARIO_32B, Lognormal(mean=7.0, sigma=0.7)),
    pair=PAIR_32B,
    model=QWEN3_32B,
    train_gpus=32,
    num_senders=32,
    max_spot_gpus=32,
)
