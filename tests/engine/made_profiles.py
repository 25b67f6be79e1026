"""A step-time profile that no engine has measured: one decode takes 11 ms."""

import random
from pathlib import Path

from rose.admission.profile import ProfileKey, fit_profile
from rose.admission.step_time import StepObservation, StepShape, StepTimeModel, attended_pairs

STEPS = StepTimeModel(base_s=0.01, per_prefill_token_s=1e-4, per_decode_s=1e-3, ratio_q99=1.0, margin_s=0.001)


def made_steps(num: int) -> list[StepObservation]:
    """Prefills and decodes of many sizes, which take exactly what STEPS says."""
    rng = random.Random(0)
    shapes = []
    for number in range(num):
        prefill, decodes = (rng.randrange(16, 512), 0) if number % 2 else (0, rng.randrange(1, 16))
        shapes.append(
            StepShape(
                prefill_tokens=prefill,
                num_decodes=decodes,
                context_tokens=100 * decodes,
                prefill_pairs=attended_pairs(prefill),
            )
        )
    return [shape.observed(STEPS.predict_step(shape)) for shape in shapes]


def store_profile(key: ProfileKey, directory: Path) -> None:
    """Stores it where an engine with this key finds it."""
    fit_profile(made_steps(200), key, directory)
