"""The other half of bench_gate's hand-over: a process that takes every turn it is given.

    python benchmarks/lib/slo/gate_player.py PAGE STEPS STEP_MS

Prints one line of JSON: for each step when it began and when it ended, CLOCK_MONOTONIC nanoseconds. With a
STEP_MS of 0 it knows nothing of turns: woken STEPS times by a bare futex, it prints when each time.
"""

import json
import mmap
import sys
import time
from pathlib import Path

from rose._shm import Words
from rose.admission.board import NUM_WORDS
from rose.admission.gate import GatePolicy, GateSettings, RolloutCandidate
from rose.admission.rollout_side import RolloutSide
from rose.admission.step_time import StepTimeModel
from rose.memory.pool.pool_memory import BOARD_BYTES
from rose.types import SLO

GATE = GateSettings(slo=SLO(ttft_s=0.5, tpot_s=0.15))
MODEL = StepTimeModel(base_s=0.001, per_prefill_token_s=1e-5, per_decode_s=1e-5)
CANDIDATE = RolloutCandidate(prefill_tokens_waiting=0, num_decodes=16, context_tokens=0)
PATIENCE_S = 30.0
BARE_BELL, BARE_READY = NUM_WORDS, NUM_WORDS + 8
"""Words that the board leaves unused."""


def main() -> int:
    with Path(sys.argv[1]).open("r+b") as file:
        words = Words(mmap.mmap(file.fileno(), BOARD_BYTES))
    num_steps, step_s = int(sys.argv[2]), float(sys.argv[3]) / 1000
    times = _take_turns(words, num_steps, step_s) if step_s > 0 else _wake_up(words, num_steps)
    print(json.dumps(times))
    return 0


def _wake_up(words: Words, num_times: int) -> list[int]:
    times: list[int] = []
    words.store(BARE_READY, 1)
    while len(times) < num_times and words.wait(BARE_BELL, len(times), PATIENCE_S):
        times.append(time.monotonic_ns())
    return times


def _take_turns(words: Words, num_steps: int, step_s: float) -> list[tuple[int, int]]:
    side, policy = RolloutSide(words), GatePolicy(GATE)
    side.set_want(True, step_s)
    times: list[tuple[int, int]] = []
    give_up_s = time.monotonic() + PATIENCE_S
    while len(times) < num_steps and time.monotonic() < give_up_s:
        if not side.wait_grant():
            continue
        view = side.view()
        decision = policy.decide(time.monotonic(), view, CANDIDATE, MODEL)
        if decision.is_admitted and side.try_begin(time.monotonic() + step_s, view):
            began_ns = time.monotonic_ns()
            time.sleep(step_s)  # the GPU works, this process waits
            times.append((began_ns, time.monotonic_ns()))
            side.end_step(16)
    side.detach()
    return times


if __name__ == "__main__":
    sys.exit(main())
