"""What arrives at a cluster of nodes: requests and training tasks, generated or from a serving trace.

Promises the same tasks for the same seed. Source: LeMix §VI-A: 1,000 tasks, of which a share is training,
with Poisson arrivals at a request rate; a trace's times are rescaled to the rate.
"""

import random
from collections.abc import Sequence

from rose.scheduler.node.model import Task
from rose.scheduler.sim.requests import TraceRow

MEAN_TOKENS, _SIGMA = 250, 0.7
"""Generated lengths are lognormal. Ours: the two datasets' distributions are only drawn in LeMix Figure 2."""
MAX_TOKENS = 4096


def generated_tasks(num_tasks: int, rate_rps: float, training_share: float, seed: int) -> list[Task]:
    """Single forward passes and training tasks in random order, with Poisson arrivals."""
    chance, now_s = random.Random(seed), 0.0
    training = _training(num_tasks, training_share, chance)
    tasks = []
    for number in range(num_tasks):
        now_s += chance.expovariate(rate_rps)
        length = MEAN_TOKENS * chance.lognormvariate(-(_SIGMA**2) / 2, _SIGMA)
        tokens = max(1, min(MAX_TOKENS, round(length)))
        tasks.append(
            Task(number=number, arrival_s=now_s, prompt_tokens=tokens, is_training=number in training)
        )
    return tasks


def trace_tasks(
    trace: Sequence[TraceRow], num_tasks: int, rate_rps: float, training_share: float, seed: int
) -> list[Task]:
    """Returns a random stretch of a trace at another rate. Training tasks are requests of it that are not
    generated.

    Raises: ValueError if the trace is shorter than that.
    """
    if len(trace) <= num_tasks:
        raise ValueError(f"need a trace of more than {num_tasks} rows, got {len(trace)}")
    chance = random.Random(seed)
    first = chance.randrange(len(trace) - num_tasks)
    rows = trace[first : first + num_tasks + 1]
    training = _training(num_tasks, training_share, chance)
    stretch = num_tasks / rate_rps / max(rows[-1].arrival_s - rows[0].arrival_s, 1e-9)
    return [
        Task(
            number=number,
            arrival_s=(row.arrival_s - rows[0].arrival_s) * stretch,
            prompt_tokens=max(1, row.prompt_tokens),
            output_tokens=1 if number in training else max(1, row.output_tokens),
            is_training=number in training,
        )
        for number, row in enumerate(rows[:-1])
    ]


def _training(num_tasks: int, share: float, chance: random.Random) -> set[int]:
    if not 0 <= share <= 1:
        raise ValueError(f"a training share is from 0 to 1, got {share}")
    return set(chance.sample(range(num_tasks), round(num_tasks * share)))
