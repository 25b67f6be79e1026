"""Merging tails: whether a rollout's last samples go on together on one worker, and how batches follow.

The decision is pure; the router moves the samples: it resumes them elsewhere with the tokens that they have.
Lengths that are still to come are unknown, and are expected to be those of the last iteration. Source:
JigsawRL §4.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rose.scheduler.gpu.substages import BUCKETS, DecodeCost

MAX_MERGED = BUCKETS[1][0]
"""More samples would leave the small bucket, and with it the slowdowns that the decision reckons with."""
MORE_OF_REACHED = 0.1
"""A sample longer than all of the last iteration is expected to take so much more of what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTail:
    """One worker's last samples, and what runs beside them (k_i and k'_i of the paper).

    `left`: the expected tokens of each sample, ascending. `tokens`: what all of them have, which the target
    prefills again. `slowdown`, `beside_slowdown`: of the samples, and of what runs beside them; 1 if nothing
    does, and infinite for what waits until the samples have ended.
    """

    worker: int
    left: tuple[int, ...]
    tokens: int
    slowdown: float = 1.0
    beside_slowdown: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """All samples of the tails continue on `target`. `gain_s`: the time saved, over both pipelines."""

    target: int
    gain_s: float


def decide_merge(
    tails: Sequence[WorkerTail],
    cost: DecodeCost,
    *,
    num_workers: int,
    beside_s: float = 0.0,
    is_elastic: bool = True,
) -> Merge | None:
    """Returns the best merge of all tails of a pipeline, or None if none saves time (AT <= 0).

    `beside_s`: what the other pipeline has left, alone; 0 if there is none. `is_elastic`: its workers share
    one batch.

    Source: JigsawRL §4.3, T_origin - T_migr, with T(K) slowed by what runs beside it, too, which the paper
    leaves out. M is what prefilling a token takes in this engine's own steps, and stands for FLOPs over MFU
    and peak. The paper slows the other pipeline to its end; here it is slowed while the samples run, and has
    every worker after them. Where it is elastic, its time follows from the balance below.
    """
    num_samples = sum(len(tail.left) for tail in tails)
    if len(tails) < 2 or num_samples == 0 or num_samples >= MAX_MERGED:
        return None
    slowed = {tail.worker: tail.beside_slowdown for tail in tails}
    before_s = max(tail.slowdown * cost.seconds(tail.left) for tail in tails)
    before_s += _beside_s(beside_s, before_s, slowed, num_workers, is_elastic)
    merged_s = cost.seconds(sorted(tokens for tail in tails for tokens in tail.left))
    all_tokens = sum(tail.tokens for tail in tails)
    best: Merge | None = None
    for target in sorted(tails, key=lambda tail: -tail.tokens):
        moved_s = (all_tokens - target.tokens) * cost.prefill_token_s
        after_s = (merged_s + moved_s) * target.slowdown
        only = {target.worker: target.beside_slowdown}
        after_s += _beside_s(beside_s, after_s, only, num_workers, is_elastic)
        if before_s > after_s and (best is None or before_s - after_s > best.gain_s):
            best = Merge(target=target.worker, gain_s=before_s - after_s)
    return best


def _beside_s(
    seconds: float, tail_s: float, slowed: Mapping[int, float], num_workers: int, is_elastic: bool
) -> float:
    """Returns how long the other pipeline takes, of whose workers these are slowed for `tail_s`."""
    if is_elastic:
        speed = (num_workers - len(slowed) + sum(1 / each for each in slowed.values())) / num_workers
    else:
        speed = 1 / max([1.0, *slowed.values()])
    if seconds <= speed * tail_s:
        return seconds / speed if seconds else 0.0
    return tail_s + seconds - speed * tail_s


def expected_left(past: Sequence[int], reached: int, num_running: int) -> tuple[int, ...]:
    """Returns the tokens that running samples have left, if they are as the last iteration's, ascending.

    `past`: the lengths of the last iteration, ascending. `reached`: what the running samples have.
    """
    longer = [tokens - reached for tokens in past if tokens > reached]
    if not longer:
        return (max(1, round(reached * MORE_OF_REACHED)),) * num_running
    ranks = ((2 * index + 1) * len(longer) // (2 * num_running) for index in range(num_running))
    return tuple(longer[min(rank, len(longer) - 1)] for rank in ranks)


def balanced(slowdowns: Sequence[float], num_samples: int) -> list[int]:
    """Divides a batch so that workers with these slowdowns end together: T(bs_i) / T(bs_t) = s.

    All samples are given out. Source: JigsawRL §4.3.
    """
    if not slowdowns or min(slowdowns) <= 0:
        raise ValueError(f"every worker needs a slowdown above 0, got {list(slowdowns)}")
    speed = sum(1 / each for each in slowdowns)
    exact = [num_samples / each / speed for each in slowdowns]
    parts = [int(each) for each in exact]
    by_rest = sorted(range(len(parts)), key=lambda index: parts[index] - exact[index])
    for index in by_rest[: num_samples - sum(parts)]:
        parts[index] += 1
    return parts
