"""A job of the tests: phases that sleep, a log of who ran when, a checkpoint per iteration.

``sleeping_job.py FOLDER ROLLOUT_S TRAIN_S``. While FOLDER has a file named ``hold``, no rollout of the
jobs and the iteration that it names, or of a later one, ends: what a test does meanwhile, it does to jobs
that run.
While there is a FOLDER/hold-NAME, that job's trainings don't end.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import rose
from rose.scheduler.runtime.job.cache import ArraySet
from rose.scheduler.runtime.job.job import running_job

folder, rollout_s, train_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
job = running_job()
assert job is not None
NAME = job.file.name
POLL_S = 0.02
weights = ArraySet()


def note(phase: str, iteration: int, begin_s: float) -> None:
    assert job is not None
    line = {
        "job": NAME,
        "pid": os.getpid(),
        "group": job.group,
        "phase": phase,
        "iteration": iteration,
        "begin_s": begin_s,
        "end_s": time.monotonic(),
    }
    with (folder / "phases.jsonl").open("a") as log:  # O_APPEND: lines of two jobs don't mix
        log.write(json.dumps(line) + "\n")


def is_held(iteration: int) -> bool:
    try:
        first, jobs = json.loads((folder / "hold").read_text())
    except FileNotFoundError:
        return False
    return iteration >= first and NAME in jobs


@rose.phase("rollout")
def rollout(iteration: int) -> None:
    begin_s = time.monotonic()
    time.sleep(rollout_s)
    while is_held(iteration):
        time.sleep(POLL_S)
    note("rollout", iteration, begin_s)


@rose.phase("train", working_set=weights)
def train(iteration: int) -> None:
    begin_s = time.monotonic()
    if not weights.arrays:
        weights.arrays = {"step": np.zeros(1, np.int64)}
    time.sleep(train_s)
    while (folder / f"hold-{NAME}").exists():
        time.sleep(0.01)
    weights.arrays["step"] = weights.arrays["step"] + 1
    note("train", iteration, begin_s)


@rose.runtime_hook
def iteration(progress: rose.Progress) -> None:
    rollout(progress.iteration)
    train(progress.iteration)


iteration()
