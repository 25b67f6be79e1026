"""A job of the tests whose rollout has a long tail on two nodes: moved aside, it lasts until another job has
run on the node that it left. Of several ranks, those behind rank 0 are in their rollouts until it is over.

``tail_job.py FOLDER``
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import rose
from rose.scheduler.runtime.job.job import running_job

NUM_RESPONSES, NUM_SHORT, SHORT, LONG = 20, 18, 50, 1000
POLL_S = 0.02
folder = Path(sys.argv[1])
job = running_job()
assert job is not None
NAME, RANK = job.file.name, job.rank
moves: list[list[int]] = []


def note(**line: object) -> None:
    with (folder / "phases.jsonl").open("a") as log:  # O_APPEND: lines of two jobs don't mix
        log.write(json.dumps({"job": NAME, **line}) + "\n")


def noted() -> list[dict[str, Any]]:
    path = folder / "phases.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def begun_since(begin_s: float) -> bool:
    return any(
        line["job"] != NAME and line["phase"] == "rollout" and line["begin_s"] > begin_s for line in noted()
    )


def wait_for_rank_0(iteration: int) -> None:
    while not any(
        line["job"] == NAME and line["iteration"] == iteration and line["phase"] == "rollout"
        for line in noted()
    ):
        time.sleep(POLL_S)


def move_tail(nodes: tuple[int, ...]) -> None:
    moves.append(list(nodes))


@rose.phase("rollout", move_tail=move_tail)
def rollout(progress: rose.Progress) -> None:
    begin_s = time.monotonic()
    moves.clear()
    if RANK:
        progress.report("rollout", NUM_RESPONSES, NUM_RESPONSES)
        wait_for_rank_0(progress.iteration)
        assert not moves
        return
    while progress.iteration > 0 and not moves:  # nothing is known of the first one's lengths
        progress.report("rollout", NUM_SHORT, NUM_RESPONSES, num_tokens=SHORT)
        time.sleep(POLL_S)
    while moves and not begun_since(begin_s):  # nobody could before the move
        time.sleep(POLL_S)
    lengths = [SHORT] * NUM_SHORT + [LONG] * (NUM_RESPONSES - NUM_SHORT)
    progress.report("rollout", NUM_RESPONSES, NUM_RESPONSES, lengths=lengths)
    note(
        phase="rollout", iteration=progress.iteration, begin_s=begin_s, end_s=time.monotonic(), moves=moves[:]
    )


@rose.phase("train")
def train(progress: rose.Progress) -> None:
    if not RANK:
        note(phase="train", iteration=progress.iteration, begin_s=time.monotonic(), end_s=time.monotonic())


@rose.runtime_hook
def iteration(progress: rose.Progress) -> None:
    rollout(progress)
    train(progress)


iteration()
