"""The demo's figures: from records to numbers, beside their targets, and which targets were met.

Owns the figures' names and their targets. Promises that a figure which was not measured is null, never zero,
and that its target never counts as met. Never measures or draws.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

from rose.demo.records import UNDER_ROSE, DemoResult, PhaseName
from rose.measure import figures as measured
from rose.measure.figures import LATENCIES, TPOT_MEDIANS, TTFT_MEDIANS, Figure, pooled_requests, ratio
from rose.types import SLO

BASELINES = (PhaseName.NAIVE, PhaseName.ALTERNATE, PhaseName.STATIC)
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
_Beside = dict[str, float | None]
_OfPhase = Callable[[DemoResult, PhaseName], float | None]
_SIGNS = {"==": operator.eq, ">=": operator.ge, "<=": operator.le}


def judge(result: DemoResult, figures: Figures) -> dict[str, bool | None]:
    """Returns which criteria were met. None: the run was too short to tell, or its load too heavy."""
    busy = figures["serving_busy_share"].value
    is_inconclusive = {
        "harvested_fraction": busy is None or busy > MAX_BUSY_SHARE,
        "reward_rise": len(result.steps) < MIN_REWARD_STEPS,
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
    return measured.objectives(pooled_requests(result.windows(PhaseName.SERVING_ALONE)))


def attainment(result: DemoResult, kind: str, *phases: PhaseName) -> float | None:
    """Returns the share of these phases' requests that met the objective for "ttft" or "tpot"."""
    return measured.attainment(pooled_requests(result.windows(*phases)), kind, objectives(result))


def worse_attainment(result: DemoResult, *phases: PhaseName) -> float | None:
    """Returns the smaller one of both shares."""
    return measured.worse_attainment(pooled_requests(result.windows(*phases)), objectives(result))


def rollout_rate(result: DemoResult, phase: PhaseName) -> float | None:
    """Returns rollout tokens per second, None where no rollouts ran."""
    for window in result.windows(phase):
        return None if phase is PhaseName.SERVING_ALONE else window.rollout_tokens / window.duration_s
    return None


def harvest(result: DemoResult, phase: PhaseName) -> float | None:
    """Returns rollout tokens per second, over those of rollouts alone."""
    return ratio(rollout_rate(result, phase), rollout_rate(result, PhaseName.ROLLOUT_ALONE))


def busy_share(result: DemoResult, phase: PhaseName) -> float | None:
    """Returns the share of the time in which the serving engine ran steps."""
    return next((window.serving_busy_s / window.duration_s for window in result.windows(phase)), None)


def compute_figures(result: DemoResult) -> Figures:
    """Returns all figures of a run."""
    parts = (_exactness(result), _attainments(result), _throughputs(result), _training(result))
    return {figure.name: figure for part in parts for figure in part}


def _figure(name: str, value: float | None, unit: str, target: str | None, peers: _Beside) -> Figure:
    return Figure(name=name, value=value, unit=unit, target=target, peers=peers)


def _beside(figure: _OfPhase, result: DemoResult, phases: Iterable[PhaseName]) -> _Beside:
    return {phase.value: figure(result, phase) for phase in phases}


def _exactness(result: DemoResult) -> list[Figure]:
    equal, outputs = ratio(result.greedy_equal, result.greedy_compared), result.greedy_compared
    checks = [step.state_hash == each for step in result.steps for each in step.engine_hashes]
    unequal = checks.count(False) if checks else None
    return [
        _figure("greedy_equal", equal, "share", "== 1", {"outputs compared": outputs}),
        _figure("checksum_mismatches", unequal, "count", "== 0", {"checksums compared": len(checks)}),
    ]


def _attainments(result: DemoResult) -> list[Figure]:
    """Returns what co-location without ROSE and with it does to the objectives: the demo's first sentence."""
    target, slo = f">= {MIN_ATTAINMENT}", objectives(result)
    naive, rose = worse_attainment(result, PhaseName.NAIVE), worse_attainment(result, *UNDER_ROSE)
    others = _beside(worse_attainment, result, BASELINES[1:])
    guarded = _beside(worse_attainment, result, (PhaseName.SERVING_ALONE, *UNDER_ROSE))
    figures = [
        _figure("demo_naive_attainment", naive, "share", "<= 0.9", others),
        _figure("demo_rose_attainment", rose, "share", target, guarded),
    ]
    for name in LATENCIES:
        limit: _Beside = {"objective, s": getattr(slo, f"{name}_s") if slo is not None else None}
        shares = {
            phase.value: attainment(result, name, phase) for phase in (PhaseName.SERVING_ALONE, *BASELINES)
        }
        met = attainment(result, name, *UNDER_ROSE)
        figures.append(_figure(f"slo_attainment[{name}]", met, "share", target, limit | shares))
    return figures


def _throughputs(result: DemoResult) -> list[Figure]:
    rose, alone = PhaseName.ROSE, PhaseName.SERVING_ALONE
    harvests = _beside(harvest, result, BASELINES)
    busy = _beside(busy_share, result, [rose])
    rates = _beside(rollout_rate, result, (PhaseName.ROLLOUT_ALONE, *BASELINES))
    target, most = f">= {MIN_HARVEST}", f"<= {MAX_BUSY_SHARE}"
    return [
        _figure("harvested_fraction", harvest(result, rose), "x rollout alone", target, harvests),
        _figure("serving_busy_share", busy_share(result, alone), "share", most, busy),
        _figure("rollout_tokens_per_s", rollout_rate(result, rose), "tokens/s", None, rates),
    ]


def _training(result: DemoResult) -> list[Figure]:
    first, last = reward_ends(result)
    rise = None if first is None or last is None else last - first
    ends: _Beside = {"first steps": first, "last steps": last, "steps": len(result.steps)}
    changed = sum(step.num_changed for step in result.steps)
    wire, coo, dense = (
        ratio(sum(getattr(step, f"{name}_bytes") for step in result.steps), changed)
        for name in ("wire", "coo", "dense")
    )
    return [
        _figure("reward_rise", rise, "reward", f">= {MIN_REWARD_RISE}", ends),
        _figure("wire_bytes_per_changed_element", wire, "bytes", None, {"coo": coo, "dense": dense}),
    ]


def reward_ends(result: DemoResult) -> tuple[float | None, float | None]:
    """Returns the mean reward of the first and of the last steps, which never overlap; None below two."""
    means = [step.reward_mean for step in result.steps]
    window = min(REWARD_WINDOW, len(means) // 2)
    return (fmean(means[:window]), fmean(means[-window:])) if window else (None, None)
