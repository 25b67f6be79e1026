"""Long-tail migration: when to move a rollout's last responses aside, so that the next job may start.

Owns: the model of a rollout phase by its response lengths, the choice of a threshold by predicted gain, and
whether moving is safe. Promises: "off" wherever the prediction says that moving doesn't pay, and no move after
which a phase could end later than its certificate assumes. Never: moves anything, or knows the lengths of
responses that are still running: it predicts from those of past iterations.

Source: WEAVE §4.3, which moves at a fixed 80%. That loses 7-9% where training takes about as long as rollouts:
the tail runs longer on few GPUs, and delays its own job's training for nodes that nobody waits for.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

THRESHOLDS = (0.8, 0.9, 0.95, 0.98)
"""Shares of finished responses at which the rest may be moved."""
MIN_PREDICTED_GAIN = 1.02
"""Less is within the prediction's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpeed:
    """How fast a job's rollout runs on the workers of its nodes.

    A decode step takes `step_s + num_running * request_s` on one worker. Moved responses are prefilled again,
    prompt and what they have, after `pause_s` of stopping and sending.
    """

    num_workers: int
    step_s: float
    request_s: float
    prompt_tokens: int
    prefill_tokens_per_s: float
    max_tokens: int
    pause_s: float = 1.0

    def decode_step_s(self, num_running: float) -> float:
        """One token for every running response of a worker."""
        return self.step_s + num_running * self.request_s

    def worst_s(self, num_requests: int, num_workers: int | None = None) -> float:
        """Every response as long as it may be. The profile's time if all workers take part."""
        workers = num_workers if num_workers is not None else self.num_workers
        return self.max_tokens * self.decode_step_s(num_requests / workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """One rollout with its tail moved: free for others at `freed_s`, all responses there at `done_s`.

    Without a move both are the same, and `num_workers` (what the tail keeps) is 0.
    """

    freed_s: float
    done_s: float
    num_workers: int


def play_rollout(
    lengths: Sequence[int], speed: RolloutSpeed, threshold: float | None, num_workers: int | None = None
) -> Tail:
    """A rollout with these response lengths on so many of its workers, the requests spread evenly.

    `threshold`: the share of finished responses at which the rest moves; None: never.
    """
    workers = num_workers if num_workers is not None else speed.num_workers
    ordered = sorted(lengths)
    if threshold is None:
        done_s = _decode_s(ordered, 0, speed, workers)
        return Tail(freed_s=done_s, done_s=done_s, num_workers=0)
    num_done = min(len(ordered), math.ceil(threshold * len(ordered)))
    rest = ordered[num_done:]
    kept = workers_kept(len(rest), len(ordered), workers)
    if not rest or kept >= workers:
        return play_rollout(lengths, speed, None, workers)
    reached = ordered[num_done - 1]
    reached_s = _decode_s(ordered[:num_done], 0, speed, workers, num_behind=len(rest))
    prefill_s = len(rest) * (speed.prompt_tokens + reached) / kept / speed.prefill_tokens_per_s
    freed_s = reached_s + speed.pause_s
    return Tail(
        freed_s=freed_s,
        done_s=freed_s + prefill_s + _decode_s(rest, reached, speed, kept),
        num_workers=kept,
    )


def workers_kept(num_left: int, num_requests: int, num_workers: int) -> int:
    """What a tail keeps: as many workers as let it decode no slower than the whole phase began."""
    return max(1, math.ceil(num_left * num_workers / num_requests))


def _decode_s(
    ordered: Sequence[int], reached: int, speed: RolloutSpeed, num_workers: int, num_behind: int = 0
) -> float:
    """Until the longest of these is done; `num_behind` longer ones run beside them."""
    time_s = 0.0
    for index, length in enumerate(ordered):
        if length > reached:
            running = (len(ordered) - index + num_behind) / num_workers
            time_s += (length - reached) * speed.decode_step_s(running)
            reached = length
    return time_s


def is_safe(
    speed: RolloutSpeed,
    *,
    num_left: int,
    num_kept: int,
    reached_tokens: int,
    left_s: float,
    next_slowdown_s: float,
) -> bool:
    """Whether moving now keeps the certificate, if the tail's and the next job's responses are all longest.

    The tail has `num_left` responses on `num_kept` workers. `left_s`: worst-case time that the phase has left by its permit; `next_slowdown_s`: how much longer than its
    own worst case the next rollout can take on the workers that the tail leaves it. It starts by that much
    earlier, or the move isn't safe.
    """
    decode_s = (speed.max_tokens - reached_tokens) * speed.decode_step_s(num_left / num_kept)
    prefill_s = num_left * (speed.prompt_tokens + reached_tokens) / num_kept / speed.prefill_tokens_per_s
    tail_s = speed.pause_s + prefill_s + decode_s
    return tail_s <= left_s and speed.pause_s + next_slowdown_s <= left_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TailJob:
    """A group's member, as the choice sees it: `past` are the response lengths of its last iterations."""

    name: str
    speed: RolloutSpeed
    past: Sequence[Sequence[int]]
    train_s: float
    sync_s: float = 0.0


def predicted_cycle_s(jobs: Sequence[TailJob], thresholds: Sequence[float | None]) -> float:
    """The mean round-robin cycle of jobs that share all their rollout nodes, in this order.

    It is as long as the rollout nodes or the training pool are busy, or as the slowest job alone takes: its
    tail counts there, but not for the nodes.
    """
    busy_s = 0.0
    alone_s = 0.0
    for index, (job, threshold) in enumerate(zip(jobs, thresholds, strict=True)):
        before = jobs[index - 1]
        guests = _typical_kept(before, thresholds[index - 1]) if len(jobs) > 1 else 0
        workers = max(1, job.speed.num_workers - guests)
        tails = [play_rollout(lengths, job.speed, threshold, workers) for lengths in job.past]
        busy_s += statistics.fmean(tail.freed_s for tail in tails)
        alone_s = max(alone_s, statistics.fmean(tail.done_s for tail in tails) + job.train_s + job.sync_s)
    return max(busy_s, alone_s, sum(job.train_s for job in jobs))


def choose_thresholds(jobs: Sequence[TailJob]) -> dict[str, float | None]:
    """For every job the threshold with the largest predicted gain, or None to leave its tail where it is.

    One job after the other takes its best, given the others', until nothing changes; all stay off unless the
    whole gains at least `MIN_PREDICTED_GAIN`.
    """
    chosen: list[float | None] = [None] * len(jobs)
    off_s = best_s = predicted_cycle_s(jobs, chosen)
    is_better = len(jobs) > 1  # alone in its group, nobody waits for its nodes
    while is_better:
        is_better = False
        for index in range(len(jobs)):
            for threshold in THRESHOLDS:
                tried = [*chosen[:index], threshold, *chosen[index + 1 :]]
                cycle_s = predicted_cycle_s(jobs, tried)
                if cycle_s < best_s * (1 - 1e-9):
                    chosen, best_s, is_better = tried, cycle_s, True
    if off_s < best_s * MIN_PREDICTED_GAIN:
        chosen = [None] * len(jobs)
    return {job.name: threshold for job, threshold in zip(jobs, chosen, strict=True)}
