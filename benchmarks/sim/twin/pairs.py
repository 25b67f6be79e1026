"""The engines that the twin models: step costs and limits of a serving and a rollout model on H800 GPUs.

Owns the constants and where they come from. Nothing here has been measured by us.

A decode step reads all weights once: bytes / (3.35 TB/s x 0.75), plus 0.5 ms of launches and sampling, and
with tensor parallelism two all-reduces of about 20 us per layer. A token costs 2 x parameters / (989 TFLOP/s
x 0.5), and in a prefill 4 x layers x heads x 128 operations more for each token that it attends. Decoding
reads each sequence's KV: 4 x layers x KV heads x 128 bytes per token of context. Peak figures: NVIDIA's data
sheet of the H800 (memory and dense BF16 as the H100's). SLOs and parallelism: ROSE §6, "Metrics" and "Models
and Training Configurations". Serving alone then decodes at 7 to 9 ms, as the prototype's model did.
"""

from dataclasses import dataclass

from rose.admission.step_time import StepTimeModel
from rose.types import SLO

MEMORY_BYTES_PER_S = 3.35e12 * 0.75
FLOPS_PER_S = 989e12 * 0.5
LAUNCH_S = 0.0005
ALL_REDUCE_S = 20e-6
HEAD_BYTES = 4 * 128  # key and value, bfloat16, head size 128 in all four models
# What a sequence adds to a step besides arithmetic and KV: its row in the batch and its sampling.
PER_SEQUENCE_S = 10e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a model's step costs follow from."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int

    def step_costs(self, num_gpus: int) -> StepTimeModel:
        """The cost of its steps, without error, split over `num_gpus`."""
        weights_s = 2 * self.parameters / num_gpus / MEMORY_BYTES_PER_S
        reduce_s = 2 * self.layers * ALL_REDUCE_S if num_gpus > 1 else 0.0
        token_s = 2 * self.parameters / num_gpus / FLOPS_PER_S
        return StepTimeModel(
            base_s=weights_s + reduce_s + LAUNCH_S,
            per_prefill_token_s=token_s,
            per_decode_s=token_s + PER_SEQUENCE_S,
            per_context_token_s=HEAD_BYTES * self.layers * self.kv_heads / num_gpus / MEMORY_BYTES_PER_S,
            per_prefill_pair_s=4 * 128 * self.layers * self.heads / num_gpus / FLOPS_PER_S,
            margin_s=0.0,
        )


QWEN2_5_7B = ModelSize(parameters=7.6e9, layers=28, heads=28, kv_heads=4)
QWEN3_8B = ModelSize(parameters=8.2e9, layers=36, heads=32, kv_heads=8)
QWEN2_5_32B = ModelSize(parameters=32.8e9, layers=64, heads=40, kv_heads=8)
QWEN3_32B = ModelSize(parameters=32.8e9, layers=64, heads=64, kv_heads=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """One engine: what its steps cost in truth, and what its scheduler may put into one."""

    costs: StepTimeModel
    max_batched_tokens: int
    max_seqs: int
    kv_tokens: int
    """Context it can hold; requests wait for room as they do for a slot."""
    num_layers: int | None = None
    """After each of which a step can be paused; None for steps that are never paused (tensor parallelism)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A serving and a rollout engine on one GPU (or one tensor-parallel set), and serving's objectives."""

    name: str
    serving: EngineModel
    rollout: EngineModel
    slo: SLO

    @property
    def decode_step_s(self) -> float:
        """Serving's step for one sequence of a typical 1000 tokens: the floor of its TPOT."""
        return self.serving.costs.predict(0, 1, 1000)


def _pair(name: str, serving: ModelSize, rollout: ModelSize, num_gpus: int, slo: SLO) -> Pair:
    # 2048 is vLLM's step budget; 16 rollouts a device: ROSE §6. KV: half of what weights leave of 80 GB.
    return Pair(
        name=name,
        serving=EngineModel(
            costs=serving.step_costs(num_gpus), max_batched_tokens=2048, max_seqs=256, kv_tokens=300_000
        ),
        rollout=EngineModel(
            costs=rollout.step_costs(num_gpus),
            max_batched_tokens=2048,
            max_seqs=16,
            kv_tokens=150_000,
            num_layers=rollout.layers if num_gpus == 1 else None,
        ),
        slo=slo,
    )


PAIR_8B = _pair("8B", QWEN2_5_7B, QWEN3_8B, 1, SLO(ttft_s=0.5, tpot_s=0.15))
PAIR_32B = _pair("32B", QWEN2_5_32B, QWEN3_32B, 4, SLO(ttft_s=1.0, tpot_s=0.45))
