"""What is simulated: models, GPUs, trajectories, traffic on the serving GPUs.

Owns: the parameters and the two scenarios of the paper, and how trajectories are drawn.
Promises: a scenario and a seed give the same trajectories and the same traffic, whatever the policy.
Never does: simulate (loop.py).

The fit. Known from ROSE (§6, Table 3, Appendices A and E): GPUs, tensor parallelism, batch, group size,
cap. From the hardware (H800: 3.35 TB/s, bf16 at about half of its peak): prefill and decode times, within a
factor of two. Free, and fitted to Table 3 and Figure 14 (a random search on three seeds, then by hand for
32B): turns and tokens per trajectory, environment times, the traffic's shape. Other values fit as well, so
what depends on them (the gain of `cost`) is only as good as the guess; benchmarks/bench_routing.py prints how
near the fit comes, on other seeds, and the gain over serving's load.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rose.scheduler.rollout.placing.views import Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """A lognormal distribution by its mean and the sigma of its logarithm."""

    mean: float
    sigma: float

    def draw(self, chance: random.Random) -> float:
        return self.mean * math.exp(chance.gauss(-self.sigma * self.sigma / 2, self.sigma))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingShare:
    """How much of a serving GPU's time serving takes, as a fraction, second by second."""

    mean_busy: float = 0.45
    gpu_spread: float = 0.12
    """Standard deviation between GPUs: they don't all serve alike."""
    swing: float = 0.18
    """Standard deviation of one GPU's slow ups and downs."""
    memory_s: float = 20.0
    """How long a swing lasts."""
    burst_every_s: float = 90.0
    burst_s: float = 6.0
    """In a burst rollouts get next to nothing."""
    max_busy: float = 0.75
    """Above it the SLO gate admits no new rollout work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One rollout phase of one job. An engine is one GPU, or several with tensor parallelism."""

    name: str
    num_dedicated: int
    num_serving: int
    gpus_per_engine: int
    num_trajectories: int
    group_size: int
    speed: Speed
    kv_tokens: int
    """Prefix cache of a dedicated engine."""
    serving_kv_tokens: int
    chunk_tokens: int
    """Prefill per step."""
    first_prompt_tokens: int
    turns: Lognormal
    turn_tokens: Lognormal
    """Generated per turn."""
    reply_tokens: Lognormal
    """What the environment adds to the prompt."""
    env_s: Lognormal
    max_turns: int
    max_context_tokens: int = 32_768
    difficulty_sigma: float = 0.0
    """Groups differ: hard prompts have longer turns in all of their trajectories."""
    lease_s: float = 10.0
    turns_per_gpu: int = 16
    traffic: ServingShare = ServingShare()

    def with_serving(self, num_serving: int) -> "Scenario":
        return replace(self, num_serving=num_serving)

    def with_busy(self, mean_busy: float) -> "Scenario":
        return replace(self, traffic=replace(self.traffic, mean_busy=mean_busy))


@dataclass(frozen=True, slots=True)
class TrajectoryStep:
    """One turn of a trajectory and the environment's answer to it."""

    new_prompt_tokens: int
    generated_tokens: int
    env_s: float


def trajectories(scenario: Scenario, seed: int) -> list[list[TrajectoryStep]]:
    """All trajectories of the phase, each the list of its turns."""
    chance = random.Random(f"{scenario.name}-{seed}")
    made = []
    for index in range(scenario.num_trajectories):
        if index % scenario.group_size == 0:
            difficulty = math.exp(chance.gauss(0.0, scenario.difficulty_sigma))
        made.append(_trajectory(scenario, chance, difficulty))
    return made


def _trajectory(scenario: Scenario, chance: random.Random, difficulty: float) -> list[TrajectoryStep]:
    num_turns = min(scenario.max_turns, max(1, round(scenario.turns.draw(chance) * difficulty)))
    context = 0
    steps: list[TrajectoryStep] = []
    for turn in range(num_turns):
        added = (
            scenario.first_prompt_tokens if turn == 0 else max(1, round(scenario.reply_tokens.draw(chance)))
        )
        generated = max(1, round(scenario.turn_tokens.draw(chance)))
        context += added + generated
        if context > scenario.max_context_tokens and steps:
            break
        steps.append(TrajectoryStep(added, generated, scenario.env_s.draw(chance)))
    return steps


def busy_fractions(traffic: ServingShare, gpu: int, seed: int) -> Iterator[float]:
    """Serving's part of one GPU's time, for every second in turn."""
    chance = random.Random(f"traffic-{gpu}-{seed}")
    level = min(0.95, max(0.0, chance.gauss(traffic.mean_busy, traffic.gpu_spread)))
    keep = math.exp(-1.0 / traffic.memory_s)
    noise = traffic.swing * math.sqrt(1.0 - keep * keep)
    swing, burst_left_s = chance.gauss(0.0, traffic.swing), 0.0
    while True:
        swing = keep * swing + chance.gauss(0.0, noise)
        if burst_left_s <= 0 and chance.random() < 1.0 / traffic.burst_every_s:
            burst_left_s = traffic.burst_s
        burst_left_s -= 1.0
        yield 0.97 if burst_left_s > 0 else min(0.97, max(0.0, level + swing))


QWEN3_8B = Scenario(
    name="8B",
    num_dedicated=8,
    num_serving=16,
    gpus_per_engine=1,
    num_trajectories=256,
    group_size=16,
    speed=Speed(prefill_s_per_token=6.0e-5, step_s=0.0077, step_s_per_turn=0.00153),
    kv_tokens=380_000,
    serving_kv_tokens=194_000,
    chunk_tokens=512,
    first_prompt_tokens=1_200,
    turns=Lognormal(mean=10.9, sigma=0.265),
    turn_tokens=Lognormal(mean=945.0, sigma=0.41),
    reply_tokens=Lognormal(mean=220.0, sigma=0.45),
    env_s=Lognormal(mean=1.4, sigma=0.8),
    max_turns=16,
    traffic=ServingShare(
        mean_busy=0.32, gpu_spread=0.045, swing=0.10, memory_s=60.0, burst_every_s=167.0, burst_s=8.0
    ),
)
"""Qwen3-8B on FrozenLake: few turns that think long."""

QWEN3_32B = Scenario(
    name="32B",
    num_dedicated=4,
    num_serving=16,
    gpus_per_engine=4,
    num_trajectories=1024,
    group_size=16,
    speed=Speed(prefill_s_per_token=2.5e-5, step_s=0.011, step_s_per_turn=0.00042),
    kv_tokens=850_000,
    serving_kv_tokens=434_000,
    chunk_tokens=512,
    first_prompt_tokens=1_000,
    turns=Lognormal(mean=20.0, sigma=0.29),
    turn_tokens=Lognormal(mean=350.0, sigma=0.32),
    reply_tokens=Lognormal(mean=80.0, sigma=0.45),
    env_s=Lognormal(mean=4.9, sigma=0.8),
    max_turns=26,
    difficulty_sigma=0.15,
    traffic=ServingShare(
        mean_busy=0.45, gpu_spread=0.12, swing=0.15, memory_s=60.0, burst_every_s=235.0, burst_s=10.0
    ),
)
"""Qwen3-32B (TP4) on ALFWorld: more turns, in batches of up to 64, on GPUs that serve less evenly."""
