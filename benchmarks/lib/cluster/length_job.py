"""The job of bench_tail's measured part: rollouts whose responses have given lengths, and whose tails move.

    python -m lib.cluster.length_job LOG PLAN.json

A rollout sleeps for the time that decoding these lengths would take on its nodes (RolloutSpeed), and a
training phase for its seconds. The sleeps stand for a device's work, which costs this host no CPU. All else
is the runtime's: reports, permits, moves. Within a rollout the delays of sleeps and answers do not add up,
because a device goes on meanwhile.
"""

import bisect
import sys
import time
from pathlib import Path

import msgspec

import rose
from lib.cluster.phase_job import PhaseLog
from rose.scheduler.group.tail import RolloutSpeed

REPORT_S = 0.05
CHUNK_S = 0.02
"""The longest sleep: a move begins no later than that."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the job is to do."""

    speed: RolloutSpeed
    lengths: list[list[int]]
    """The lengths of each iteration's responses."""
    train_s: float


class Decoding:
    """One rollout."""

    def __init__(self, speed: RolloutSpeed, lengths: list[int]) -> None:
        self._speed = speed
        self._lengths = sorted(lengths)
        self._num_nodes = speed.num_workers
        self._reached = 0
        self._at_s = time.monotonic()

    def run(self, progress: rose.Progress) -> None:
        """Runs until the longest response is there."""
        total, reported_s = len(self._lengths), self._at_s
        while (num_done := bisect.bisect_right(self._lengths, self._reached)) < total:
            step_s = self._speed.decode_step_s((total - num_done) / self._num_nodes)
            num_tokens = min(self._lengths[num_done] - self._reached, max(1, int(CHUNK_S / step_s)))
            self._reached += num_tokens
            self._sleep(num_tokens * step_s)
            if self._at_s >= reported_s + REPORT_S and self._reached < self._lengths[-1]:
                reported_s = self._at_s
                num_done = bisect.bisect_right(self._lengths, self._reached)
                progress.report("rollout", num_done, total, num_tokens=self._reached)
        progress.report("rollout", total, total, lengths=self._lengths)

    def move(self, num_nodes: int) -> None:
        """Sends what still runs to this many nodes, where it is prefilled again."""
        num_left = len(self._lengths) - bisect.bisect_right(self._lengths, self._reached)
        prefill_tokens = num_left * (self._speed.prompt_tokens + self._reached) / num_nodes
        self._num_nodes = num_nodes
        self._sleep(self._speed.pause_s)  # the nodes that are left are free after it
        self._at_s += prefill_tokens / self._speed.prefill_tokens_per_s

    def _sleep(self, seconds: float) -> None:
        self._at_s += seconds
        time.sleep(max(0.0, self._at_s - time.monotonic()))


def main() -> None:
    """Runs the job's iterations."""
    log = PhaseLog(Path(sys.argv[1]))
    plan = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Plan)
    decoding = Decoding(plan.speed, [])
    where = 0

    def move_tail(nodes: tuple[int, ...]) -> None:
        log.note("move", "rollout", where, time.monotonic())
        decoding.move(len(nodes))

    @rose.phase("rollout", move_tail=move_tail)
    def rollout(progress: rose.Progress) -> None:
        nonlocal decoding, where
        begin_s, where = time.monotonic(), progress.iteration
        decoding = Decoding(plan.speed, plan.lengths[progress.iteration])
        decoding.run(progress)
        log.note("end", "rollout", progress.iteration, begin_s)

    @rose.phase("train")
    def train(iteration: int) -> None:
        begin_s = time.monotonic()
        time.sleep(plan.train_s)
        log.note("end", "train", iteration, begin_s)

    @rose.runtime_hook
    def iteration(progress: rose.Progress) -> None:
        rollout(progress)
        train(progress.iteration)

    iteration()


if __name__ == "__main__":
    main()
