"""Measures ahead of time how many rollouts an engine should run at once (ROSE Appendix A).

The measurement goes through the engine's own front end. Prompts are in the prefix cache before the clock
starts, as a turn's is in production. If they don't all fit, turns evict each other's prefixes, which the cap
has to avoid.
"""

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from rose.messages import ConcurrencyPoint, ConcurrencyProfile
from rose.node.control import EngineControl

MAX_CONCURRENCY = 64
TOLERANCE = 0.05
"""Throughput this close to the best is as good: more turns would only cost each of them latency."""
REPEATS = 3
NEW_TOKENS = 64
_LOW_IDS = (3, 60)
"""Token ids that every vocabulary has."""


def pick_cap(points: Sequence[ConcurrencyPoint], tolerance: float = TOLERANCE) -> int:
    """Returns the fewest concurrent turns whose throughput comes within ``tolerance`` of the best.

    Source: ROSE Appendix A: throughput grows up to a batch size, then saturates or falls. Raises: ValueError
    if there are no points.
    """
    if not points:
        raise ValueError("no throughput was measured, so there is no cap to pick")
    enough = (1.0 - tolerance) * max(point.tokens_per_s for point in points)
    return min(point.concurrency for point in points if point.tokens_per_s >= enough)


def measure_concurrency(
    control: EngineControl, *, max_concurrency: int, gpus: int, seed: int = 0
) -> ConcurrencyProfile:
    """Runs 1, 2, 4, ... turns at once, each with half of the model's context. Raises: WorkerError."""
    max_model_len = control.max_model_len()
    new_tokens = max(1, min(NEW_TOKENS, max_model_len // 4))
    context_tokens = max(1, max_model_len // 2)
    rng = random.Random(seed)
    points = []
    for concurrency in levels(max_concurrency):
        rates = [
            concurrency * new_tokens / _turns_s(control, rng, concurrency, context_tokens, new_tokens)
            for _ in range(REPEATS)
        ]
        points.append(ConcurrencyPoint(concurrency=concurrency, tokens_per_s=statistics.median(rates)))
    cap = pick_cap(points)
    return ConcurrencyProfile(
        model=control.model,
        context_tokens=context_tokens,
        new_tokens=new_tokens,
        gpus=gpus,
        points=tuple(points),
        cap=cap,
        turns_per_gpu=max(1, cap // gpus),
    )


def levels(most: int) -> list[int]:
    """Returns the powers of two up to ``most``, and ``most`` itself."""
    return sorted({*(1 << i for i in range(most.bit_length()) if 1 << i <= most), most})


def _turns_s(
    control: EngineControl, rng: random.Random, concurrency: int, context_tokens: int, new_tokens: int
) -> float:
    prompts = [[rng.randrange(*_LOW_IDS) for _ in range(context_tokens)] for _ in range(concurrency)]
    control.complete(prompts, 1)
    began = time.monotonic()
    control.complete(prompts, new_tokens)
    return time.monotonic() - began


def store(profile: ConcurrencyProfile, path: Path) -> None:
    """Writes the file that ``rose router --concurrency-profile`` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(profile.model_dump_json(indent=2) + "\n")
    draft.replace(path)
