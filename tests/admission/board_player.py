"""A process at one side of a board, for tests: `board_player.py PAGE ACTION [NUMBER NUMBER]`.

Inside every step it checks that it is alone, through words of the page that the board leaves unused.
"""

import mmap
import os
import random
import sys
import time

from rose._shm import Words
from rose.admission.board import SLOT_WORDS, BoardWord
from rose.admission.claim import MAX_GUESTS, MAX_SERVING
from rose.admission.gate import GateReason, ServingView
from rose.admission.liveness import is_alive, own_identity
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide
from rose.admission.slack import NEVER

INSIDE, VIOLATIONS, TOTAL, STOP = 400, 408, 416, 424
SERVING_INSIDE, GUEST_INSIDE = 432, 440
"""A word for each slot: who computes in it, which a dead process leaves behind."""


def open_words(path: str) -> Words:
    with open(path, "r+b") as page:
        return Words(mmap.mmap(page.fileno(), 4096))


def critical_section(words: Words, rng: random.Random) -> None:
    if words.add(INSIDE, 1) != 1:
        words.add(VIOLATIONS, 1)
    total = words.load(TOTAL)
    if rng.random() < 0.3:
        time.sleep(rng.random() * 2e-4)
    words.store(TOTAL, total + 1)
    words.add(INSIDE, -1)


def check_alone(words: Words, *, but_guest: int, with_serving: bool) -> None:
    """Counts a violation if another process that lives computes: a guest other than ``but_guest``, or a
    serving engine if there should be none."""
    places = [
        (GUEST_INSIDE + slot, BoardWord.R_IDENTITY + SLOT_WORDS * slot)
        for slot in range(MAX_GUESTS)
        if slot != but_guest
    ]
    if not with_serving:
        places += [
            (SERVING_INSIDE + slot, BoardWord.S_IDENTITY + SLOT_WORDS * slot) for slot in range(MAX_SERVING)
        ]
    for inside, identity in places:
        who = words.load(inside)
        if who and who == words.load(identity) and is_alive(who) and who == words.load(inside):
            words.add(VIOLATIONS, 1)


def serve(words: Words, num_steps: int, num_rollout_steps: int) -> None:
    """Until both sides have done so many steps: rollout's process may start, or get to run, much later."""
    rng = random.Random(1)
    side = ServingSide(words)
    while words.load(BoardWord.S_STEPS) < num_steps - 1 or words.load(BoardWord.R_STEPS) < num_rollout_steps:
        has_work = rng.random() < 0.7
        serve_step(side, words, rng, has_work)
        if not has_work:
            time.sleep(rng.random() * 5e-4)
    # The last publication leaves work behind: only a detach may free the GPU then.
    serve_step(side, words, rng, has_work=True)
    side.detach()
    words.store(STOP, 1)


def serve_step(side: ServingSide, words: Words, rng: random.Random, has_work: bool) -> None:
    side.offer_grant(NEVER, 0.002)
    side.begin_step(grace_s=60)
    critical_section(words, rng)
    side.end_step(ServingView(has_work=has_work, has_pending_prefill=False, latest_start_s=NEVER))


def roll_out(words: Words) -> None:
    rng = random.Random(2)
    side = RolloutSide(words)
    side.set_want(True)
    while not words.load(STOP):
        if not side.wait_grant():
            continue
        view = side.view()
        if rng.random() < 0.2:
            side.decline(view, GateReason.NO_SLACK)
        elif side.try_begin(time.monotonic() + 60, view):
            critical_section(words, rng)
            side.end_step(1)
    side.detach()


def serve_among_many(words: Words) -> None:
    """Steps beside other serving engines; no guest may compute meanwhile."""
    rng = random.Random(os.getpid())
    side = ServingSide(words)
    inside = SERVING_INSIDE + side.slot
    while not words.load(STOP):
        has_work = rng.random() < 0.7
        side.offer_grant(NEVER, 0.002)
        side.begin_step()
        words.store(inside, own_identity())
        check_alone(words, but_guest=-1, with_serving=True)
        time.sleep(rng.random() * 2e-4)
        words.store(inside, 0)
        side.end_step(ServingView(has_work=has_work, has_pending_prefill=False, latest_start_s=NEVER))
        time.sleep(rng.random() * 5e-4)
    side.detach()


def guest_among_many(words: Words) -> None:
    rng = random.Random(os.getpid())
    side = RolloutSide(words)
    inside = GUEST_INSIDE + side.slot
    side.set_want(True)
    while not words.load(STOP):
        if not side.wait_grant():
            continue
        view = side.view()
        if rng.random() < 0.2:
            side.decline(view, GateReason.NO_SLACK)
        elif side.try_begin(time.monotonic() + 60, view):
            words.store(inside, own_identity())
            check_alone(words, but_guest=side.slot, with_serving=False)
            time.sleep(rng.random() * 2e-4)
            words.store(inside, 0)
            side.end_step(1)
    side.detach()


def hang_in_step(side: ServingSide | RolloutSide) -> None:
    if isinstance(side, ServingSide):
        side.begin_step()
    else:
        side.set_want(True)
        assert side.try_begin(time.monotonic() + 600, side.view())
    print("in step", flush=True)
    time.sleep(600)


def main() -> None:
    words = open_words(sys.argv[1])
    action = sys.argv[2]
    if action == "serve":
        serve(words, int(sys.argv[3]), int(sys.argv[4]))
    elif action == "roll-out":
        roll_out(words)
    elif action == "serve-among-many":
        serve_among_many(words)
    elif action == "guest-among-many":
        guest_among_many(words)
    elif action == "hang-serving":
        hang_in_step(ServingSide(words))
    elif action == "hang-rollout":
        hang_in_step(RolloutSide(words))
    else:
        raise SystemExit(f"unknown action {action}")


if __name__ == "__main__":
    main()
