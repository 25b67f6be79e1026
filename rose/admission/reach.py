"""Which SLOs an engine can reach at all, by its own step times.

An SLO that can't be reached is an operator's mistake and is refused: with it the gate would refuse every
rollout step without saying why.
"""

import math

from rose.admission.step_time import StepTimeModel
from rose.types import SLO, Deployment


def floors_s(model: StepTimeModel) -> tuple[float, float]:
    """Returns the TTFT and TPOT that 99 of 100 requests stay within on an otherwise idle engine.

    They are the times of a step with a prompt of one token, and of a step with one decode.
    """
    return model.predict_safe(1, 0), model.predict_safe(0, 1)


def unreachable_slo(slo: SLO, model: StepTimeModel, deployment: Deployment) -> str | None:
    """Says why an SLO can't be reached and what could be; None if it can.

    A prefiller has no TPOT to keep, and a decoder no TTFT.
    """
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
