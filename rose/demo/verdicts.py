"""One plain paragraph per criterion of the demo: what was asked, what came out.

Owns the wording. Promises never to call a criterion met that wasn't measured. Never computes figures.
"""

from rose.demo.figures import (
    MAX_BUSY_SHARE,
    MIN_ATTAINMENT,
    MIN_HARVEST,
    MIN_REWARD_RISE,
    MIN_REWARD_STEPS,
    DemoFigures,
    Verdict,
)
from rose.demo.records import UNDER_ROSE, DemoResult
from rose.measure.figures import percentile, pooled_requests, tpots_s, ttfts_s

NOT_MEASURED = "Not measured in this run."


def judge(result: DemoResult, figures: DemoFigures) -> list[Verdict]:
    """All criteria, in the order of the issue."""
    return [
        _greedy(result, figures),
        _checksums(result, figures),
        _slo(result, figures, "ttft"),
        _slo(result, figures, "tpot"),
        _harvest(figures),
        _reward(result, figures),
    ]


def _greedy(result: DemoResult, figures: DemoFigures) -> Verdict:
    title, equal = "Greedy output equals stock vLLM", figures.value("greedy_equal")
    if equal is None:
        return Verdict(title=title, is_met=None, text=NOT_MEASURED)
    return Verdict(
        title=title,
        is_met=equal == 1.0,
        text=f"{result.greedy_equal} of {result.greedy_compared} serving outputs, made while slabs moved "
        "between the two models, equal the reference token by token.",
    )


def _checksums(result: DemoResult, figures: DemoFigures) -> Verdict:
    title, mismatches = "Weights arrive bit-exact", figures.value("checksum_mismatches")
    if mismatches is None:
        return Verdict(title=title, is_met=None, text=NOT_MEASURED)
    return Verdict(
        title=title,
        is_met=mismatches == 0,
        text=f"{result.checksums_compared} whole-model checksums compared after weight syncs, "
        f"{result.checksum_mismatches} differed.",
    )


def _slo(result: DemoResult, figures: DemoFigures, name: str) -> Verdict:
    values, limit_s = (ttfts_s, result.slo.ttft_s) if name == "ttft" else (tpots_s, result.slo.tpot_s)
    title = f"{name.upper()} within {limit_s * 1000:.0f} ms"
    figure = figures[f"slo_attainment[{name}]"]
    requests = pooled_requests(result.windows(*UNDER_ROSE))
    if figure.value is None:
        return Verdict(title=title, is_met=None, text=NOT_MEASURED)
    text = (
        f"{figure.value:.1%} of {len(requests)} serving requests met it under ROSE (asked: at least "
        f"{MIN_ATTAINMENT:.0%}; an unanswered request counts as a miss)."
    )
    p99 = percentile(values(requests), 99)
    ratio, naive = figures.value(f"{name}_p99_ratio"), figures.value(f"naive_{name}_p99_ratio")
    if p99 is not None:
        text += f" P99 is {p99 * 1000:.0f} ms"
        text += f", {ratio:.2f} times serving alone" if ratio is not None else ""
        text += f"; naive co-location is at {naive:.2f} times." if naive is not None else "."
    return Verdict(title=title, is_met=figure.value >= MIN_ATTAINMENT, text=text)


def _harvest(figures: DemoFigures) -> Verdict:
    title = f"Rollout harvests {MIN_HARVEST:.0%} of a free GPU"
    harvest, busy = figures.value("harvested_fraction"), figures.value("serving_busy_share")
    if harvest is None:
        return Verdict(title=title, is_met=None, text=NOT_MEASURED)
    rate, naive = figures.value("rollout_tokens_per_s"), figures["harvested_fraction"].peers.get("naive")
    text = f"The co-located rollout engine made {harvest:.0%} of its throughput alone"
    text += f" ({rate:.0f} tokens/s)" if rate is not None else ""
    text += f", naive co-location {naive:.0%}." if naive is not None else "."
    is_met: bool | None = harvest >= MIN_HARVEST
    if busy is None:
        text += " Serving's busy share was not measured."
        is_met = None
    else:
        text += (
            f" Serving alone kept the engine {busy:.0%} busy (the criterion: at most {MAX_BUSY_SHARE:.0%})."
        )
        if busy > MAX_BUSY_SHARE and not is_met:
            text += " The load was heavier than the criterion's, so it is not judged."
            is_met = None
    return Verdict(title=title, is_met=is_met, text=text)


def _reward(result: DemoResult, figures: DemoFigures) -> Verdict:
    title = f"Reward rises by {MIN_REWARD_RISE}"
    first, last = figures.value("reward_first"), figures.value("reward_last")
    if first is None or last is None:
        return Verdict(title=title, is_met=None, text=NOT_MEASURED)
    num_steps = len(result.rewards)
    text = (
        f"Mean reward went from {first:.2f} over the first of {num_steps} training steps to {last:.2f} over "
        f"the last: {last - first:+.2f}."
    )
    is_met: bool | None = last - first >= MIN_REWARD_RISE
    if num_steps < MIN_REWARD_STEPS and not is_met:
        text += f" The criterion allows {MIN_REWARD_STEPS} steps, so it is not judged."
        is_met = None
    return Verdict(title=title, is_met=is_met, text=text)
