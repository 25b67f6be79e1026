"""Why a window's tail is longer than serving's alone: the same requests of two windows, one by one.

Reads what `bench_slo.py --records FOLDER` left there. A P99 over a few dozen requests is the worst of them,
and says nothing of its cause; what separates the causes is printed instead:

- a first token that came later by at most one rollout step: the request met a step on an idle GPU;
- gaps in which nobody waited for a first token, longer for every number of decodes: whoever shares the CPU;
- only the first such gap of an answer longer: caches, or the end of the rollout engine's step in Python;
- gaps in which somebody did wait, and more of them: the same steps in another mix, as arrivals queued up
  behind a rollout step and prefill rides along;
- requests that were sent late: the client's CPU;
- seconds that a part of the serving engine had no CPU: contention, and where.

    python benchmarks/slo_tail.py RECORDS --case "density 1" --policy "idle only"
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lib.slo.figures import ALONE
from lib.slo.policies import IDLE

from rose.measure.figures import percentile
from rose.measure.records import RequestRecord, read_records

Window = Sequence[RequestRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Between two tokens of one answer."""

    seconds: float
    num_decodes: int
    """Answers under way meanwhile, this one among them."""
    has_prefill: bool
    """Somebody waited for a first token in it."""
    is_first: bool


def main() -> int:
    args = _parser().parse_args()
    alone, other = (_windows(args.records, args.case, name) for name in (ALONE, args.policy))
    rounds = sorted(alone.keys() & other.keys())
    if not rounds:
        sys.exit(f"{args.records}: no round of {args.case!r} with both {ALONE!r} and {args.policy!r}")
    for index in rounds:
        print(f"\n{args.case}, round {index}: {args.policy} beside {ALONE}")
        _compare(read_records(alone[index]), read_records(other[index]))
        _compare_counters(_counters(alone[index]), _counters(other[index]))
    return 0


def _windows(folder: Path, case: str, policy: str) -> dict[int, Path]:
    """Returns the last try of each round, by the round's number."""
    stem = re.escape(f"serving-rose-{case}-{policy}-try".replace(" ", "-"))
    named = [(re.fullmatch(rf"{stem}(\d+)-(\d+)\.jsonl", path.name), path) for path in folder.iterdir()]
    tries = sorted((int(m[2]), int(m[1]), path) for m, path in named if m is not None)
    return {index: path for index, _, path in tries}


def _counters(window: Path) -> dict[str, float]:
    path = window.with_name(window.name.replace("serving-", "counters-", 1)).with_suffix(".json")
    counters: dict[str, float] = json.loads(path.read_text())
    return counters


def _compare_counters(alone: dict[str, float], other: dict[str, float]) -> None:
    """Prints the counters of whole windows; more seconds without a CPU mean contention there."""
    for name, value in other.items():
        if value or alone.get(name):
            print(f"  {name:<66} {alone.get(name, 0.0):.3f} -> {value:.3f}")


def _compare(alone: Window, other: Window) -> None:
    pairs = [pair for pair in zip(alone, other, strict=True) if all(each.token_times_s for each in pair)]
    later = [1e3 * (b.ttft_s - a.ttft_s) for a, b in pairs if a.ttft_s is not None and b.ttft_s is not None]
    late = [1e3 * (b.sent_s - b.scheduled_s - (a.sent_s - a.scheduled_s)) for a, b in pairs]
    ratios = [b.tpot_s / a.tpot_s for a, b in pairs if a.tpot_s is not None and b.tpot_s is not None]
    _line("first token later by, ms", later)
    _line("of it sent later by, ms", late)
    _line("TPOT over the same request's alone", ratios)
    gaps = [list(_gaps(window)) for window in (alone, other)]
    for count in (1, 2, 3, 4):
        for is_first in (True, False):
            both = [[g for g in each if _is_like(g, count, is_first)] for each in gaps]
            what = f"{'first' if is_first else 'later'} gap, {count}{'+' if count == 4 else ''} decoding"
            _two_lines(f"{what}, nobody waiting, ms", both)
    _two_lines("gap while somebody waited, ms", [[g for g in each if g.has_prefill] for each in gaps])
    for name, window in ((ALONE, alone), ("beside rollouts", other)):
        print(f"  worst TPOT, {name}: {_story(window)}")


def _is_like(gap: Gap, count: int, is_first: bool) -> bool:
    return not gap.has_prefill and gap.is_first is is_first and min(gap.num_decodes, 4) == count


def _gaps(window: Window) -> Iterator[Gap]:
    answered = [each for each in window if each.token_times_s]
    for request in answered:
        for number, (begin_s, end_s) in enumerate(pairwise(request.token_times_s)):
            spans = [(each.sent_s, each.token_times_s[0], each.token_times_s[-1]) for each in answered]
            yield Gap(
                seconds=end_s - begin_s,
                num_decodes=sum(first_s <= begin_s and last_s >= end_s for _, first_s, last_s in spans),
                has_prefill=any(sent_s < end_s and first_s > begin_s for sent_s, first_s, _ in spans),
                is_first=number == 0,
            )


def _story(window: Window) -> str:
    worst = max((each for each in window if each.tpot_s is not None), key=lambda each: each.tpot_s or 0.0)
    times_s = worst.token_times_s
    longest_s, begin_s, end_s = max((b - a, a, b) for a, b in pairwise(times_s))
    waiting = [
        each.num_prompt_tokens
        for each in window
        if each.token_times_s and each.sent_s < end_s and each.token_times_s[0] > begin_s
    ]
    return (
        f"{1e3 * (worst.tpot_s or 0.0):.1f} ms over {len(times_s)} tokens, longest gap "
        f"{1e3 * longest_s:.1f} ms while prompts of {waiting} tokens waited"
    )


def _two_lines(what: str, gaps: Sequence[Sequence[Gap]]) -> None:
    for name, each in zip((ALONE, "beside rollouts"), gaps, strict=True):
        _line(f"{what}: {name}", [1e3 * gap.seconds for gap in each])


def _line(what: str, values: Sequence[float]) -> None:
    if values:
        found = " / ".join(f"{percentile(values, percent):.2f}" for percent in (50, 90, 99, 100))
        print(f"  {what:<66} n={len(values):<5} P50/P90/P99/most {found}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", type=Path, help="the folder that bench_slo.py --records wrote")
    parser.add_argument("--case", default="density 1")
    parser.add_argument("--policy", default=IDLE)
    return parser


if __name__ == "__main__":
    sys.exit(main())
