"""A job of the tests on Ray whose ranks see whether another job's process is in the same phase.

``locking_job.py FOLDER SECONDS JOB...``. In a phase each rank holds a lock, which the kernel takes from a
dead process, and looks at the locks of the other JOBs' ranks. It adds a line for each phase to
FOLDER/notes.jsonl.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path

import rose
from rose.scheduler.runtime.job.job import running_job

folder, SECONDS, JOBS = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
job = running_job()
assert job is not None
NAME, RANK, ATTEMPT, NUM_RANKS = job.file.name, job.rank, job.file.attempt, job.file.num_ranks


def note(**fields: object) -> None:
    line = {"job": NAME, "attempt": ATTEMPT, "rank": RANK, "pid": os.getpid(), **fields}
    with (folder / "notes.jsonl").open("a") as log:  # O_APPEND: lines of several processes don't mix
        log.write(json.dumps(line) + "\n")


def run(phase: str, iteration: int) -> None:
    with (folder / f"{phase}-{NAME}-{RANK}.lock").open("a") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        for name in JOBS:
            for rank in range(NUM_RANKS) if name != NAME else ():
                with (folder / f"{phase}-{name}-{rank}.lock").open("a") as other:
                    try:
                        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    except BlockingIOError:
                        note(beside=name, phase=phase)
        time.sleep(SECONDS)
        note(phase=phase, iteration=iteration)


@rose.phase("rollout")
def rollout(iteration: int) -> None:
    run("rollout", iteration)


@rose.phase("train")
def train(iteration: int) -> None:
    run("train", iteration)


@rose.runtime_hook
def iteration(progress: rose.Progress) -> None:
    rollout(progress.iteration)
    train(progress.iteration)


note(told={})
iteration()
