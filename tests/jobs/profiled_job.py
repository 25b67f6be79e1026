"""A job of the tests that is profiled, and then run; what goes wrong, if anything, is its first argument.

``profiled_job.py MISTAKE FOLDER``: a rollout sleeps for its tokens, ordinary responses have 10 of them.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import rose
from rose.scheduler.runtime.job.cache import ArraySet

MISTAKE, FOLDER = sys.argv[1], Path(sys.argv[2])
TOKEN_S, TRAIN_S, ORDINARY_TOKENS = 0.002, 0.03, 10
RESET_S, REWARDS_S, CHECKPOINT_S = 0.05, 0.1, 0.2
weights = ArraySet()


def note(**line: object) -> None:
    with (FOLDER / "phases.jsonl").open("a") as log:
        log.write(json.dumps({"pid": os.getpid(), **line}) + "\n")


@rose.phase("rollout")
def rollout(progress: rose.Progress) -> None:
    forced = progress.forced_tokens if MISTAKE != "forgets" else None
    num_tokens = forced if forced is not None else ORDINARY_TOKENS
    note(phase="rollout", iteration=progress.iteration, num_tokens=num_tokens)
    time.sleep(num_tokens * TOKEN_S if MISTAKE != "hangs" else 3600.0)
    if MISTAKE == "crashes":
        print("no such dataset: math-17k", flush=True)
        sys.exit(7)


@rose.phase("train", working_set=weights)
def train() -> None:
    if not weights.arrays:
        weights.arrays = {"weights": np.ones(1 << 18, np.float32)}
    time.sleep(TRAIN_S)


@rose.phase("sync")
def sync() -> None:
    pass


@rose.phase("checkpoint")
def checkpoint() -> None:
    time.sleep(CHECKPOINT_S)


@rose.runtime_hook
def iteration(progress: rose.Progress) -> None:
    if MISTAKE == "saves":
        time.sleep(RESET_S)
    rollout(progress)
    if MISTAKE == "saves":
        time.sleep(REWARDS_S)
    train()
    if MISTAKE == "saves":
        checkpoint()
    if MISTAKE == "syncs":
        sync()


if MISTAKE != "idles":
    iteration()
