"""Long-tail migration: when to move a rollout's last responses aside, so that the next job may start.

Owns the model of a rollout phase by its response lengths, the choice of a threshold by predicted gain, and
the test whether moving is safe. No tail moves where the prediction shows no gain, or where a phase could then
end later than its certificate assumes. Lengths of running responses are unknown: predictions use past
iterations.

At run time a job reports that the chosen share of its responses is done. Then `workers_kept` says on how many
workers the rest may go, `has_room` says whether the next job may start on the others, and
`PermitBook.begin_tail` lets it in.

Source: WEAVE §4.3, which moves at a fixed 80%. That loses 7-9% where training takes about as long as
rollouts: the tail runs longer on few GPUs and delays its own job's training, while no job waits for the
nodes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

THRESHOLDS = (0.8, 0.9, 0.95, 0.98)
"""Shares of finished responses at which the rest may be moved."""
PREDICTED_PASSES = 12
MIN_PREDICTED_GAIN = 1.02
MIN_STEP = 0.01
"""Smaller gains are within the prediction's error, for one job and for all thresholds together."""


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
        """Returns the time of one token for every running response of a worker."""
        return self.step_s + num_running * self.request_s

    def worst_s(self, num_requests: int, num_workers: int | None = None) -> float:
        """Returns the time if every response is as long as it may be: the profile's if all workers take
        part."""
        workers = num_workers if num_workers is not None else self.num_workers
        return self.max_tokens * self.decode_step_s(num_requests / workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedTail:
    """One rollout with its tail moved: free for others at `freed_s`, all responses there at `done_s`.

    Without a move both are the same, and `num_workers` (what the tail keeps) is 0. `left_s`: worst-case time
    that the phase still had when it freed the rest.
    """

    freed_s: float
    done_s: float
    num_workers: int
    left_s: float


def play_rollout(
    lengths: Sequence[int], speed: RolloutSpeed, threshold: float | None, num_workers: int | None = None
) -> MovedTail:
    """Returns a rollout with these response lengths on this many of its workers, the requests spread evenly.

    `threshold`: the share of finished responses at which the rest moves, if that is safe; None: never.
    """
    workers = num_workers if num_workers is not None else speed.num_workers
    ordered = sorted(lengths)
    num_done = math.ceil(threshold * len(ordered)) if threshold is not None else len(ordered)
    rest = ordered[num_done:]
    reached_s = _decode_s(ordered[:num_done], 0, speed, workers, num_behind=len(rest))
    left_s = speed.worst_s(len(ordered), workers) - reached_s
    reached = ordered[num_done - 1]
    kept = workers_kept(speed, num_left=len(rest), reached_tokens=reached, left_s=left_s, num_workers=workers)
    if kept is None:
        done_s = _decode_s(ordered, 0, speed, workers)
        return MovedTail(freed_s=done_s, done_s=done_s, num_workers=0, left_s=0.0)
    tail_s = _moved_s(speed, len(rest), reached, kept) + _decode_s(rest, reached, speed, kept)
    return MovedTail(
        freed_s=reached_s + speed.pause_s,
        done_s=reached_s + tail_s,
        num_workers=kept,
        left_s=left_s - speed.pause_s,
    )


def workers_kept(
    speed: RolloutSpeed, *, num_left: int, reached_tokens: int, left_s: float, num_workers: int
) -> int | None:
    """Returns the fewest of a rollout's workers that end its tail within `left_s` even if all of it is
    longest.

    `left_s`: until the worst case that the certificate assumes. None: it can't be moved, or there is none.
    """
    if num_left == 0:
        return None
    for kept in range(1, num_workers // 2 + 1):  # more, and the next job has little to start with
        decode_s = (speed.max_tokens - reached_tokens) * speed.decode_step_s(num_left / kept)
        if _moved_s(speed, num_left, reached_tokens, kept) + decode_s <= left_s:
            return kept
    return None


def has_room(next_speed: RolloutSpeed, num_requests: int, tail: MovedTail) -> bool:
    """Returns whether the next rollout, on what the tail leaves, at worst ends no later than without the
    move.

    It takes longer on fewer workers, but starts earlier by what the tail's phase had left.
    """
    left = next_speed.num_workers - tail.num_workers
    return next_speed.worst_s(num_requests, left) - next_speed.worst_s(num_requests) <= tail.left_s


def _moved_s(speed: RolloutSpeed, num_left: int, reached_tokens: int, kept: int) -> float:
    prefill_tokens = num_left * (speed.prompt_tokens + reached_tokens)
    return speed.pause_s + prefill_tokens / kept / speed.prefill_tokens_per_s


def _decode_s(
    ordered: Sequence[int], reached: int, speed: RolloutSpeed, num_workers: int, num_behind: int = 0
) -> float:
    """The time until the longest of these is done; `num_behind` longer ones run beside them."""
    time_s = 0.0
    for index, length in enumerate(ordered):
        if length > reached:
            running = (len(ordered) - index + num_behind) / num_workers
            time_s += (length - reached) * speed.decode_step_s(running)
            reached = length
    return time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TailJob:
    """A group's member, as the choice sees it: `past` are the response lengths of its last iterations."""

    name: str
    speed: RolloutSpeed
    past: Sequence[Sequence[int]]
    train_s: float
    sync_s: float = 0.0


def predicted_cycle_s(jobs: Sequence[TailJob], thresholds: Sequence[float | None]) -> float:
    """Returns the mean round-robin cycle of jobs that share all their rollout nodes, in this order.

    Their past iterations once more, several times and against one another: means would hide that a cycle is
    as long as its slowest part.
    """
    nodes_s = train_s = 0.0
    ready_s = [0.0] * len(jobs)
    guests: list[tuple[float, int]] = []
    for number in range(PREDICTED_PASSES):
        for index, (job, threshold) in enumerate(zip(jobs, thresholds, strict=True)):
            start_s = max(nodes_s, ready_s[index])
            guests = [guest for guest in guests if guest[0] > start_s]
            workers = max(1, job.speed.num_workers - sum(kept for _, kept in guests))
            lengths = job.past[(number + index * (number // len(job.past))) % len(job.past)]
            tail = play_rollout(lengths, job.speed, threshold, workers)
            nodes_s = start_s + tail.freed_s
            guests.append((start_s + tail.done_s, tail.num_workers))
            train_s = max(train_s, start_s + tail.done_s) + job.train_s
            ready_s[index] = train_s + job.sync_s
    return train_s / PREDICTED_PASSES


def choose_thresholds(jobs: Sequence[TailJob]) -> dict[str, float | None]:
    """For every job the threshold with the largest predicted gain, or None to leave its tail where it is.

    From the best threshold for all, one job after the other takes its best, given the others', until nothing
    changes; all stay off unless the whole gains at least `MIN_PREDICTED_GAIN`.
    """
    off: list[float | None] = [None] * len(jobs)
    if len(jobs) < 2:  # nobody waits for its nodes
        return {job.name: None for job in jobs}
    off_s = predicted_cycle_s(jobs, off)
    alike: list[list[float | None]] = [[each] * len(jobs) for each in (None, *THRESHOLDS)]
    best_s, chosen = min(
        ((predicted_cycle_s(jobs, each), each) for each in alike), key=lambda found: found[0]
    )
    is_better = True
    while is_better:
        is_better = False
        for index in range(len(jobs)):
            for threshold in (None, *THRESHOLDS):
                tried = [*chosen[:index], threshold, *chosen[index + 1 :]]
                cycle_s = predicted_cycle_s(jobs, tried)
                if cycle_s < best_s * (1 - MIN_STEP):
                    chosen, best_s, is_better = tried, cycle_s, True
    if off_s < best_s * MIN_PREDICTED_GAIN:
        chosen = off
    return {job.name: threshold for job, threshold in zip(jobs, chosen, strict=True)}
