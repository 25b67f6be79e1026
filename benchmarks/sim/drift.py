"""Changes jobs' times while they run, by WEAVE's drift templates.

Owns: the templates and when changes are seen. Promises: the same seed gives the same changes. Never:
simulates.

Source: WEAVE §6.6: none, increasing or decreasing, at 0.5, 1.0 and 1.5 times what was observed. The observed
drift is only drawn there (Figure 16). Ours is a linear drift of the rollout by 20% over a job's life, and of
training by the same, because training follows the generated tokens.
"""

import random
from collections.abc import Sequence

from rose.scheduler.sim.loop import Drift
from rose.scheduler.sim.workloads import Submission

OBSERVED = 0.2
STEP_S = 3600.0
"""Changes are seen every hour. Source: WEAVE §6.6, footnote 8."""
SCALES: dict[str, tuple[float, ...]] = {
    "increasing": (0.0, 0.5, 1.0, 1.5),
    "decreasing": (0.0, -0.5, -1.0, -1.5),
    "mixed": (0.0, 0.5, 1.0, 1.5, -0.5, -1.0, -1.5),
}


def drifts(submitted: Sequence[Submission], kind: str, seed: int) -> list[Drift]:
    """A template for each job, as changes on the hour."""
    chance = random.Random(seed)
    changes = []
    for one in submitted:
        drift = OBSERVED * chance.choice(SCALES[kind])
        hour = int(one.arrival_s // STEP_S) + 1
        while drift and (time_s := hour * STEP_S) < one.arrival_s + one.work_s:
            factor = 1 + drift * (time_s - one.arrival_s) / one.work_s
            changes.append(Drift(time_s=time_s, name=one.job.name, factor=factor))
            hour += 1
    return changes
