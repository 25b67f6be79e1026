"""One plain paragraph per criterion of the demo: what was asked, what came out.

Owns the wording. Promises never to call a criterion met that wasn't measured. Never computes figures.
"""

from dataclasses import dataclass

from rose.demo.figures import (
    MAX_BUSY_SHARE,
    MIN_ATTAINMENT,
    MIN_HARVEST,
    MIN_REWARD_RISE,
    TPOT_MEDIANS,
    TTFT_MEDIANS,
    Figures,
)
from rose.demo.records import DemoResult

MIN_REWARD_STEPS = 40
"""Training steps within which a reward has to have risen; a run cut off before proves nothing either way."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one criterion came out; ``is_met`` is None when the run can't tell."""

    title: str
    is_met: bool | None = None
    text: str = "Not measured in this run."


def judge(result: DemoResult, figures: Figures) -> list[Verdict]:
    """Returns how all criteria came out."""
    return [
        _greedy(result, figures["greedy_equal"].value),
        _checksums(result, figures["checksum_mismatches"].value),
        _objective(figures, "ttft", TTFT_MEDIANS),
        _objective(figures, "tpot", TPOT_MEDIANS),
        _harvest(figures),
        _reward(len(result.rewards), figures["reward_first"].value, figures["reward_last"].value),
    ]


def _greedy(result: DemoResult, equal: float | None) -> Verdict:
    title = "Greedy output equals stock vLLM"
    if equal is None:
        return Verdict(title)
    text = (
        f"{result.greedy_equal} of {result.greedy_compared} outputs, made while slabs moved between the two "
        "models, equal the reference token by token."
    )
    return Verdict(title, equal == 1.0, text)


def _checksums(result: DemoResult, mismatches: float | None) -> Verdict:
    title = "Weights arrive bit-exact"
    if mismatches is None:
        return Verdict(title)
    text = (
        f"{result.checksums_compared} whole-model checksums compared after weight syncs, "
        f"{result.checksum_mismatches} differed."
    )
    return Verdict(title, mismatches == 0, text)


def _objective(figures: Figures, name: str, medians: float) -> Verdict:
    title = f"{name.upper()} within {medians:g} times serving's own median"
    share, limit_s = figures[f"slo_attainment[{name}]"].value, figures[f"slo[{name}]"].value
    if share is None or limit_s is None:
        return Verdict(title)
    text = (
        f"{share:.1%} of the serving requests met {1e3 * limit_s:.0f} ms under ROSE (asked: at least "
        f"{MIN_ATTAINMENT:.0%}; an unanswered request counts as a miss)."
    )
    if (naive := figures[f"slo_attainment[{name}]"].peers["naive"]) is not None:
        text += f" Under naive co-location, {naive:.1%} did."
    rose_ratio, naive_ratio = (figures[f"{each}{name}_p99_ratio"].value for each in ("", "naive_"))
    if rose_ratio is not None and naive_ratio is not None:
        text += f" The P99 is {rose_ratio:.2f} times that of serving alone; naively {naive_ratio:.2f} times."
    return Verdict(title, share >= MIN_ATTAINMENT, text)


def _harvest(figures: Figures) -> Verdict:
    title = f"Rollout harvests {MIN_HARVEST:.0%} of a free GPU"
    harvest, busy = figures["harvested_fraction"].value, figures["serving_busy_share"].value
    if harvest is None or busy is None:
        return Verdict(title)
    peers = figures["harvested_fraction"].peers
    beside = ", ".join(f"{name} {share:.0%}" for name, share in peers.items() if share is not None)
    text = f"The co-located rollout engine made {harvest:.0%} of its throughput alone ({beside}). Serving "
    text += f"alone kept the engine {busy:.0%} busy (the criterion: at most {MAX_BUSY_SHARE:.0%})."
    text = text.replace(" ()", "").replace("_", " ")
    is_met = harvest >= MIN_HARVEST
    if busy > MAX_BUSY_SHARE and not is_met:
        return Verdict(title, None, f"{text} The load was heavier than the criterion's: it is not judged.")
    return Verdict(title, is_met, text)


def _reward(num_steps: int, first: float | None, last: float | None) -> Verdict:
    title = f"Reward rises by {MIN_REWARD_RISE}"
    if first is None or last is None:
        return Verdict(title)
    text = (
        f"Mean reward went from {first:.2f} over the first of {num_steps} training steps to {last:.2f} over "
        f"the last: {last - first:+.2f}."
    )
    is_met = last - first >= MIN_REWARD_RISE
    if num_steps < MIN_REWARD_STEPS and not is_met:
        return Verdict(
            title, None, f"{text} The criterion allows {MIN_REWARD_STEPS} steps, so it is not judged."
        )
    return Verdict(title, is_met, text)
