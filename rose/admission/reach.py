"""What SLO an engine can reach at all, by its own step times.

Owns the floors and the wording of what is wrong. Pure. Never changes an SLO: one that can't be reached is an
operator's mistake, and a gate that went by it would refuse every rollout step without saying why.
"""

import math

from rose.admission.step_time import StepTimeModel
from rose.types import SLO, Deployment


def floors_s(model: StepTimeModel) -> tuple[float, float]:
    """(TTFT, TPOT) that 99 of 100 requests stay within on an engine with nothing else to do: the step of a
    one-token prompt, and of one decode."""
    return model.predict_safe(1, 0), model.predict_safe(0, 1)


def unreachable_slo(slo: SLO, model: StepTimeModel, deployment: Deployment) -> str | None:
    """What is wrong with the SLO and what could be reached instead; None where it can be met.

    A prefiller has no TPOT to keep, and a decoder no TTFT."""
    problems = []
    for name, given_s, floor_s, step, elsewhere in (
        ("slo_ttft_ms", slo.ttft_s, floors_s(model)[0], "the prefill of one token", Deployment.DECODE),
        ("slo_tpot_ms", slo.tpot_s, floors_s(model)[1], "one decode step", Deployment.PREFILL),
    ):
        if given_s < floor_s and deployment is not elsewhere:
            problems.append(
                f"{name} is {1e3 * given_s:g}, but {step} takes up to {1e3 * floor_s:.1f} ms "
                f"(99th percentile); set {name} to at least {math.ceil(1e3 * floor_s)}"
            )
    return "; ".join(problems) if problems else None
