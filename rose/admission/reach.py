"""Which SLOs an engine can reach by its own step times, and which bounds of harm can be shown.

An SLO that can't be reached is an operator's mistake and is refused, because the gate would refuse every
rollout step under it without saying why. An SLO that serving misses at its load is reported, so that rollouts
are not blamed for it.
"""

import math
from collections.abc import Mapping

from rose.admission.harm import DAY_S, MEASURING_SHARE, MIN_GROUPS, STUDENT_Z
from rose.admission.slices import SLICE_S
from rose.admission.step_time import StepTimeModel
from rose.types import SLO, Deployment

LEAST_NOISE = 0.005
"""The least difference between the steps of two slices. Real ones differ by more."""
LEAST_BOUND = 1e-4
"""The smallest bound that a day of the steadiest traffic can show, rounded up."""


def floors_s(model: StepTimeModel, tokens_per_step: int = 1) -> tuple[float, float]:
    """Returns the TTFT and TPOT that 99 of 100 requests stay within on an otherwise idle engine.

    They are the times of a step with a prompt of one token, and of a step with one decode, for each of the
    ``tokens_per_step`` that it gives if every draft token is accepted.
    """
    return model.predict_safe(1, 0), model.predict_safe(0, 1) / tokens_per_step


def unreachable_slo(slo: SLO, floors_s: tuple[float, float], deployment: Deployment) -> str | None:
    """Returns why an SLO is below the engine's ``floors_s`` and what could be reached; None if it is not.

    A prefiller has no TPOT to keep, and a decoder no TTFT.
    """
    problems = []
    steps = ("the prefill of one token", "one decoded token")
    for (name, given_s), floor_s, step in zip(_objectives(slo), floors_s, steps, strict=True):
        if given_s < floor_s and is_kept(name, deployment):
            problems.append(
                f"slo_{name}_ms is {1e3 * given_s:g}, but {step} takes up to {1e3 * floor_s:.1f} ms "
                f"(99th percentile); set slo_{name}_ms to at least {math.ceil(1e3 * floor_s)}"
            )
    return "; ".join(problems) if problems else None


def missed_slo(slo: SLO, alone_s: Mapping[str, tuple[float, float]], deployment: Deployment) -> str | None:
    """Returns which SLOs serving misses at its load even without rollouts; None if it misses none.

    ``alone_s`` has the P99 of "ttft" and "tpot" without rollouts, and its lower bound, which decides.
    """
    problems = []
    for name, given_s in _objectives(slo):
        value_s, low_s = alone_s.get(name, (0.0, 0.0))
        if low_s > given_s and is_kept(name, deployment):
            problems.append(
                f"the {name.upper()} P99 of serving alone is {1e3 * value_s:.4g} ms (at least "
                f"{1e3 * low_s:.4g}), above slo_{name}_ms of {1e3 * given_s:g}, and rollouts are not the "
                f"reason; lower the load, or set slo_{name}_ms to at least {math.ceil(1e3 * value_s)}"
            )
    return "; ".join(problems) if problems else None


def is_kept(latency: str, deployment: Deployment) -> bool:
    """Whether an engine with this deployment has the latency ("ttft" or "tpot") to keep."""
    elsewhere = {"ttft": Deployment.DECODE, "tpot": Deployment.PREFILL}
    return deployment is not elsewhere[latency]


def bound_problem(allowed: float) -> str | None:
    """Returns why no traffic can show within a day whether a P99 differs by more than ``allowed``, and which
    bound can be shown; None if some traffic can show it."""
    slices_a_day = DAY_S / SLICE_S * MEASURING_SHARE
    shown = STUDENT_Z * LEAST_NOISE / math.sqrt(slices_a_day)
    if allowed >= shown:
        return None
    return (
        f"allow_harm is {allowed:g}, and no traffic can show so small a difference: the {slices_a_day:,.0f} "
        f"slices of a day without rollouts tell {shown:.3%} at best, and this bound would take "
        f"{(shown / allowed) ** 2:,.0f} days; set allow_harm to at least {LEAST_BOUND:g}"
    )


def least_seconds_to_know(allowed: float) -> float:
    """Returns the least seconds of continuous traffic that can show a difference of ``allowed``."""
    num_slices = max(MIN_GROUPS, (STUDENT_Z * LEAST_NOISE / allowed) ** 2)
    return num_slices * SLICE_S / MEASURING_SHARE


def _objectives(slo: SLO) -> tuple[tuple[str, float], ...]:
    return ("ttft", slo.ttft_s), ("tpot", slo.tpot_s)
