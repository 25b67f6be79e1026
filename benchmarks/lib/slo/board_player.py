"""One party of bench_board: a serving engine or a guest on a page, without a GPU.

    python benchmarks/lib/slo/board_player.py PAGE RECORD KIND PARTY STEP_MS [DEVICE]

KIND is serve, guest, idle-serving or idle-guest. Steps are sleeps, or kernels that fill DEVICE, one of
torch's. What happened goes into the record, so that it outlives a killed process; PARTY is the place in it.
A player goes on until the record says stop.
"""

import mmap
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rose._shm import Words
from rose.admission.board import SLOT_WORDS, BoardWord, to_ns
from rose.admission.claim import MAX_GUESTS
from rose.admission.gate import GateReason, ServingView
from rose.admission.liveness import is_alive, own_identity
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import NO_WORK, ServingSide
from rose.memory.pool.pool_memory import BOARD_BYTES

STOP, OVERLAPS = 0, 1
COMPUTES = 8
"""A word for each guest's slot: who computes in it, which a dead process leaves behind."""
PARTIES, PARTY_WORDS = 64, 1024
STEPS, FAULTS, WAITS, SLEEPS = 0, 1, 8, 512
"""A party's words: its steps; a count that grows with each fault of it; how many of its steps waited for so
many milliseconds, and how many of its sleeps ended so late."""
NUM_BINS = 500
RECORD_BYTES = 8 * (PARTIES + 8 * PARTY_WORDS)
SERVING_STEP_S = 0.0002
SLACK_S, HANDOVER_S = 0.004, 0.002
HAS_WORK, DECLINES = 0.7, 0.1
LONGEST_IDLE_S = 0.004
Compute = Callable[[float], None]
"""Computes for a number of seconds."""


def open_words(path: str, num_bytes: int) -> Words:
    with Path(path).open("r+b") as file:
        return Words(mmap.mmap(file.fileno(), num_bytes))


def main() -> int:
    compute = _matmuls(sys.argv[6]) if len(sys.argv) > 6 else time.sleep
    words, record = open_words(sys.argv[1], BOARD_BYTES), open_words(sys.argv[2], RECORD_BYTES)
    party, step_s = PARTIES + PARTY_WORDS * int(sys.argv[4]), float(sys.argv[5]) / 1000
    if sys.argv[3] == "serve":
        serve(words, record, party, compute)
    elif sys.argv[3] == "guest":
        roll_out(words, record, party, step_s, compute)
    else:
        _attached = ServingSide(words) if sys.argv[3] == "idle-serving" else RolloutSide(words)
        record.add(party + STEPS, 1)
        while not record.load(STOP):
            time.sleep(0.01)
    return 0


def _matmuls(device: str) -> Compute:
    import torch
    from gpu.rig import Matmuls

    return Matmuls(torch.device(device))


def serve(words: Words, record: Words, party: int, compute: Compute) -> None:
    rng, side = random.Random(party), ServingSide(words)
    while not record.load(STOP):
        if rng.random() < HAS_WORK:
            latest_s = time.monotonic() + SLACK_S
            side.publish(ServingView(has_work=True, has_pending_prefill=False, latest_start_s=latest_s))
            side.offer_grants(latest_s, HANDOVER_S)
        else:
            time.sleep(rng.random() * LONGEST_IDLE_S)
        faults, wanted_ns = record.load(party + FAULTS), time.monotonic_ns()
        side.begin_step()
        began_ns = time.monotonic_ns()
        _expect_no_guest(words, record, side.slot)
        compute(SERVING_STEP_S)
        ended_ns = time.monotonic_ns()
        side.end_step(NO_WORK)
        # A step in which this process was stopped itself says nothing.
        if record.load(party + FAULTS) == faults:
            _count(record, party + WAITS, began_ns - wanted_ns)
            _count(record, party + SLEEPS, ended_ns - began_ns - to_ns(SERVING_STEP_S))
        record.add(party + STEPS, 1)
    side.detach()


def roll_out(words: Words, record: Words, party: int, step_s: float, compute: Compute) -> None:
    rng, side, me = random.Random(party), RolloutSide(words), own_identity()
    side.set_want(True, step_s)
    while not record.load(STOP):
        if not side.wait_grant():
            continue
        view = side.view()
        if rng.random() < DECLINES:
            side.decline(view, GateReason.NO_SLACK)
        elif view.may_start and side.try_begin(time.monotonic() + 2 * step_s, view):
            record.store(COMPUTES + side.slot, me)
            _expect_no_guest(words, record, None, but=side.slot)
            compute(step_s)
            record.store(COMPUTES + side.slot, 0)
            side.end_step(1)
            record.add(party + STEPS, 1)
    side.detach()


def _expect_no_guest(words: Words, record: Words, serving: int | None, but: int = -1) -> None:
    """Counts an overlap with a guest that lives and has not run past its time: that one is given up."""
    now_ns = time.monotonic_ns()
    for slot in range(MAX_GUESTS):
        who, at = record.load(COMPUTES + slot), SLOT_WORDS * slot
        if slot == but or not who or who != words.load(BoardWord.R_IDENTITY + at) or not is_alive(who):
            continue
        if now_ns < words.load(BoardWord.R_EST_END + at) and who == record.load(COMPUTES + slot):
            record.add(OVERLAPS, 1)


def _count(record: Words, first: int, time_ns: int) -> None:
    record.add(first + min(NUM_BINS - 1, max(0, time_ns) // 1_000_000), 1)


if __name__ == "__main__":
    sys.exit(main())
