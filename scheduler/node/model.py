"""What the node level decides about: tasks, and what they cost on the stages of a node.

Owns the nouns and the cost of a pass. Promises that costs are a pure function of token counts. Never decides.
Source: LeMix §II-A (Table I), §IV-A. Our copy lacks the text of §IV-A, and its printed cost, coefficient x
batch x length^2, leaves out the cost of a pass at length 0. Here a stage's cost is quadratic with all three
terms.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rose.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One inference request, or one training microbatch, as it arrives."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int = 1
    """Tokens to generate; the first comes from the prefill. 1 is a single forward pass, as in LeMix §VI-B."""
    is_training: bool = False

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"a task has at least 1 token each way, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """Seconds of one pass through one stage: constant + per_token * l + per_pair * l^2."""

    constant_s: float
    per_token_s: float
    per_pair_s: float

    def __post_init__(self) -> None:
        coefficients = (self.constant_s, self.per_token_s, self.per_pair_s)
        if not all(0 <= each < math.inf for each in coefficients) or not any(coefficients):
            raise ValueError(
                f"a pass's cost needs coefficients of at least 0, and one above, got {coefficients}"
            )

    def seconds(self, tokens: float, pairs: float) -> float:
        """Returns a pass's time. `tokens`: of all its sequences; `pairs`: what these add to the squares of
        lengths."""
        return self.constant_s + self.per_token_s * tokens + self.per_pair_s * pairs

    def scaled(self, factor: float) -> "PassCost":
        return PassCost(
            constant_s=self.constant_s * factor,
            per_token_s=self.per_token_s * factor,
            per_pair_s=self.per_pair_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One GPU's part of the model."""

    forward: PassCost
    backward: PassCost
    kv_token_bytes: int
    activation_token_bytes: int
    """What training keeps of a token from its forward to its backward pass."""
    free_bytes: int
    """Device memory beside weights and optimizer states."""

    def __post_init__(self) -> None:
        if min(self.kv_token_bytes, self.activation_token_bytes, self.free_bytes) < 0:
            raise ValueError(f"a stage has at least 0 bytes of each kind, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProfile:
    """A model's stages on one node's GPUs, measured there or taken from the paper."""

    model: str
    hardware: str
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError(f"profile of {self.model}: it needs at least one stage")

    def forward_s(self, tokens: float) -> float:
        """Returns an idle node's time for one forward pass of a sequence, through all stages."""
        return sum(stage.forward.seconds(tokens, tokens * tokens) for stage in self.stages)

    def backward_s(self, tokens: float) -> float:
        return sum(stage.backward.seconds(tokens, tokens * tokens) for stage in self.stages)

    def forwards(self, tokens: float) -> list[float]:
        """Returns a forward pass's seconds on each stage."""
        return [stage.forward.seconds(tokens, tokens * tokens) for stage in self.stages]

    def backwards(self, tokens: float) -> list[float]:
        return [stage.backward.seconds(tokens, tokens * tokens) for stage in self.stages]

    def scaled(self, factor: float) -> "NodeProfile":
        """Returns the same model on hardware that takes `factor` times as long."""
        stages = tuple(
            replace(stage, forward=stage.forward.scaled(factor), backward=stage.backward.scaled(factor))
            for stage in self.stages
        )
        return replace(self, stages=stages)

    def on(self, num_gpus: int) -> "NodeProfile":
        """This profile, if a node of `num_gpus` can hold its stages. Raises: ConfigError if it can't."""
        if len(self.stages) > num_gpus:
            raise ConfigError(
                f"the profile of {self.model} has {len(self.stages)} stages and a node has {num_gpus} GPUs: "
                f"profile the model with at most {num_gpus} stages"
            )
        return self


TABLE_II: dict[str, tuple[float, float, int, int]] = {
    "llama-8b": (0.11, 0.15, 32, 4096),
    "llama-13b": (0.24, 0.36, 40, 5120),
    "llama-70b": (0.73, 1.05, 80, 8192),
}
"""Forward and backward seconds, layers and hidden size. Source: LeMix Table II."""
_SHARES = (0.1, 0.85, 0.05)
"""What constant, linear layers and attention take of a pass at the mean length. Our reconstruction, by the
arithmetic of Llama-8B on A100s at half of their peak: the paper prints the sum alone."""
_FREE_BYTES = 40 << 30
_KV_HEADS_SHARE = 4
"""Llama 3 has a quarter of its query heads, or fewer, as KV heads."""
_ACTIVATION_WORDS = 17
"""Half-precision words of a layer that training keeps for each unit of hidden size, with fused attention."""


def paper_profile(model: str, mean_tokens: float, num_stages: int = 2) -> NodeProfile:
    """LeMix Table II as a profile: its seconds are those of a sequence of the mean length.

    Raises: ConfigError for a model that the table lacks.
    """
    if model not in TABLE_II:
        raise ConfigError(f"no profile of {model}: give --profile FILE, or one of {', '.join(TABLE_II)}")
    forward_s, backward_s, num_layers, hidden = TABLE_II[model]
    layers = num_layers / num_stages
    stage = Stage(
        forward=_reconstructed(forward_s / num_stages, mean_tokens),
        backward=_reconstructed(backward_s / num_stages, mean_tokens),
        kv_token_bytes=int(layers * 2 * 2 * hidden / _KV_HEADS_SHARE),
        activation_token_bytes=int(layers * 2 * _ACTIVATION_WORDS * hidden),
        free_bytes=_FREE_BYTES,
    )
    return NodeProfile(model=model, hardware="A100, from LeMix Table II", stages=(stage,) * num_stages)


def _reconstructed(seconds: float, tokens: float) -> PassCost:
    constant, linear, pairs = _SHARES
    return PassCost(
        constant_s=constant * seconds,
        per_token_s=linear * seconds / tokens,
        per_pair_s=pairs * seconds / tokens**2,
    )


class Lengths:
    """Running mean and deviation of task lengths (Welford)."""

    __slots__ = ("_squares", "count", "mean")

    def __init__(self, lengths: Iterable[float] = ()) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0
        for length in lengths:
            self.add(length)

    def add(self, length: float) -> None:
        self.count += 1
        delta = length - self.mean
        self.mean += delta / self.count
        self._squares += delta * (length - self.mean)

    def consistency(self, length: float) -> float:
        """Returns how well a length fits the earlier ones, from 0 to 1; 0 before there are two.

        Source: LeMix eq. 2. Its factor 1 / (sigma sqrt(2 pi)) is left out: it has the unit 1/token, and it
        is infinite for equal lengths. The deviation is at least a token.
        """
        if self.count < 2:
            return 0.0
        variance = max(self._squares / self.count, 1.0)
        distance = length - self.mean
        return math.exp(-distance * distance / (2.0 * variance))
