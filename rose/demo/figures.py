"""The demo's figures: from records to numbers, beside their targets, and which targets were met.

Owns the figures' names, their targets and serving's objectives. Promises that a figure nobody measured is
null, never zero, and that none is called met that was not measured. Never measures or draws.
"""

import operator
from collections.abc import Mapping

from rose.demo.records import UNDER_ROSE, DemoResult, PhaseName
from rose.measure.figures import (
    Figure,
    attainment,
    percentile,
    pooled_requests,
    ratio,
    tpot,
    tpots_s,
    ttft,
    ttfts_s,
)
from rose.types import SLO

BASELINES = (PhaseName.NAIVE, PhaseName.ALTERNATE, PhaseName.STATIC)
TTFT_MEDIANS, TPOT_MEDIANS = 3.0, 2.0
"""Serving's objectives, in medians of serving alone: what an operator may promise who has measured it. The
first tokens of the largest bursts alone take twice the median."""
MAX_BUSY_SHARE = 0.35
"""The harvest criterion speaks of serving that is at most this busy."""
MIN_HARVEST = 0.6
MIN_ATTAINMENT = 0.99
MIN_REWARD_RISE = 0.3
REWARD_WINDOW = 5
"""Steps averaged at either end of the run: one step's reward is noise."""
MIN_REWARD_STEPS = 40
"""Training steps within which a reward has to have risen; a run cut off before proves nothing either way."""

CRITERIA = {
    "greedy_equal": "greedy outputs, made while slabs moved, that equal stock vLLM's",
    "checksum_mismatches": "checksums of whole models that differ after a weight sync",
    "slo_attainment[ttft]": f"requests under ROSE within a TTFT of {TTFT_MEDIANS:g} medians of serving alone",
    "slo_attainment[tpot]": f"requests under ROSE within a TPOT of {TPOT_MEDIANS:g} medians of serving alone",
    "harvested_fraction": "rollout tokens per second under ROSE, of those of rollouts alone",
    "reward_rise": "rise of the mean reward from the first training steps to the last ones",
}
"""The figures by which a run is judged, and what each of them is."""
Figures = Mapping[str, Figure]
"""All figures of one run by name, in the order of the printed table."""
_SIGNS = {"==": operator.eq, ">=": operator.ge, "<=": operator.le}


def judge(result: DemoResult, figures: Figures) -> dict[str, bool | None]:
    """Returns which criteria were met. None: the run was too short to tell, or its load too heavy."""
    busy = figures["serving_busy_share"].value
    is_inconclusive = {
        "harvested_fraction": busy is None or busy > MAX_BUSY_SHARE,
        "reward_rise": len(result.rewards) < MIN_REWARD_STEPS,
    }
    found: dict[str, bool | None] = {}
    for name in CRITERIA:
        sign, bound = str(figures[name].target).split()
        value = figures[name].value
        is_met = None if value is None else bool(_SIGNS[sign](value, float(bound)))
        found[name] = is_met or (None if is_inconclusive.get(name, False) else is_met)
    return found


def objectives(result: DemoResult) -> SLO | None:
    """Returns serving's latency objectives on this machine, None where serving alone was not measured."""
    ttft_s, tpot_s = (latency(result, name, 50, PhaseName.SERVING_ALONE) for name in ("ttft", "tpot"))
    if ttft_s is None or tpot_s is None:
        return None
    return SLO(ttft_s=TTFT_MEDIANS * ttft_s, tpot_s=TPOT_MEDIANS * tpot_s)


def share_met(result: DemoResult, name: str, *phases: PhaseName) -> float | None:
    """Returns the share of these phases' requests that met the objective ``name``, "ttft" or "tpot"."""
    slo = objectives(result)
    if slo is None:
        return None
    each, limit_s = (ttft, slo.ttft_s) if name == "ttft" else (tpot, slo.tpot_s)
    return attainment(pooled_requests(result.windows(*phases)), each, limit_s)


def worse_attainment(result: DemoResult, *phases: PhaseName) -> float | None:
    """Returns the smaller of the two shares of these phases' requests that met an objective."""
    both = [share_met(result, name, *phases) for name in ("ttft", "tpot")]
    return min((share for share in both if share is not None), default=None)


def rollout_rate(result: DemoResult, phase: PhaseName) -> float | None:
    """Returns rollout tokens per second, None where no rollouts ran."""
    for window in result.windows(phase):
        return None if phase is PhaseName.SERVING_ALONE else window.rollout_tokens / window.duration_s
    return None


def harvest(result: DemoResult, phase: PhaseName) -> float | None:
    """Returns rollout tokens per second, over those of rollouts alone."""
    return ratio(rollout_rate(result, phase), rollout_rate(result, PhaseName.ROLLOUT_ALONE))


def latency(result: DemoResult, name: str, percent: float, *phases: PhaseName) -> float | None:
    """Returns a percentile of these phases' "ttft" or "tpot", in seconds."""
    seconds = {"ttft": ttfts_s, "tpot": tpots_s}[name]
    return percentile(seconds(pooled_requests(result.windows(*phases))), percent)


def busy_share(result: DemoResult, phase: PhaseName) -> float | None:
    """Returns the share of the time in which the serving engine ran steps."""
    return next((window.serving_busy_s / window.duration_s for window in result.windows(phase)), None)


def compute_figures(result: DemoResult) -> Figures:
    """Returns all figures of a run."""
    exact = [
        Figure(
            name="greedy_equal",
            value=ratio(result.greedy_equal, result.greedy_compared),
            unit="share",
            target="== 1",
            peers={"outputs compared": result.greedy_compared},
        ),
        Figure(
            name="checksum_mismatches",
            value=result.checksum_mismatches if result.checksums_compared else None,
            unit="count",
            target="== 0",
            peers={"checksums compared": result.checksums_compared},
        ),
    ]
    parts = (exact, _attainments(result), _throughputs(result), _training(result))
    return {figure.name: figure for part in parts for figure in part}


def _attainments(result: DemoResult) -> list[Figure]:
    """What co-location without ROSE and with it does to the objectives: the demo's first sentence."""
    beside, slo = (PhaseName.SERVING_ALONE, *BASELINES), objectives(result)
    limits_s = {"ttft": slo.ttft_s, "tpot": slo.tpot_s} if slo is not None else {}
    return [
        Figure(
            name="demo_naive_attainment",
            value=worse_attainment(result, PhaseName.NAIVE),
            unit="share",
            target="<= 0.9",
            peers={name.value: worse_attainment(result, name) for name in BASELINES[1:]},
        ),
        Figure(
            name="demo_rose_attainment",
            value=worse_attainment(result, *UNDER_ROSE),
            unit="share",
            target=f">= {MIN_ATTAINMENT}",
            peers={
                name.value: worse_attainment(result, name) for name in (PhaseName.SERVING_ALONE, *UNDER_ROSE)
            },
        ),
        *(
            Figure(
                name=f"slo_attainment[{name}]",
                value=share_met(result, name, *UNDER_ROSE),
                unit="share",
                target=f">= {MIN_ATTAINMENT}",
                peers={
                    "objective, s": limits_s.get(name),
                    **{phase.value: share_met(result, name, phase) for phase in beside},
                },
            )
            for name in ("ttft", "tpot")
        ),
    ]


def _throughputs(result: DemoResult) -> list[Figure]:
    return [
        Figure(
            name="harvested_fraction",
            value=harvest(result, PhaseName.ROSE),
            unit="x rollout alone",
            target=f">= {MIN_HARVEST}",
            peers={name.value: harvest(result, name) for name in BASELINES},
        ),
        Figure(
            name="serving_busy_share",
            value=busy_share(result, PhaseName.SERVING_ALONE),
            unit="share",
            target=f"<= {MAX_BUSY_SHARE}",
            peers={"rose": busy_share(result, PhaseName.ROSE)},
        ),
        Figure(
            name="rollout_tokens_per_s",
            value=rollout_rate(result, PhaseName.ROSE),
            unit="tokens/s",
            peers={name.value: rollout_rate(result, name) for name in (PhaseName.ROLLOUT_ALONE, *BASELINES)},
        ),
    ]


def _training(result: DemoResult) -> list[Figure]:
    first, last = reward_ends(result)
    deltas = [sync for sync in result.syncs if not sync.is_base]
    changed = sum(sync.num_changed for sync in deltas)
    return [
        Figure(
            name="reward_rise",
            value=None if first is None or last is None else last - first,
            unit="reward",
            target=f">= {MIN_REWARD_RISE}",
            peers={"first steps": first, "last steps": last, "steps": len(result.rewards)},
        ),
        Figure(
            name="wire_bytes_per_changed_element",
            value=ratio(sum(sync.wire_bytes for sync in deltas), changed),
            unit="bytes",
            peers={
                "coo": ratio(sum(sync.coo_bytes for sync in deltas), changed),
                "dense": ratio(sum(sync.dense_bytes for sync in deltas), changed),
            },
        ),
    ]


def reward_ends(result: DemoResult) -> tuple[float | None, float | None]:
    """Returns the mean reward of the first and of the last steps, which never overlap; None below two."""
    means = [point.reward_mean for point in result.rewards]
    window = min(REWARD_WINDOW, len(means) // 2)
    if window == 0:
        return None, None
    return sum(means[:window]) / window, sum(means[-window:]) / window
