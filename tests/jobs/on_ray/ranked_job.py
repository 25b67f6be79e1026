"""A job of the tests on Ray: says what it was told, then runs phases that sleep.

``ranked_job.py FOLDER``. While FOLDER has a file ``hold-NAME``, no rollout of the job ends.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import rose
from rose.scheduler.runtime.job.job import running_job

folder = Path(sys.argv[1])
job = running_job()
assert job is not None
NAME = job.file.name


def note(**fields: Any) -> None:
    assert job is not None
    line = {"job": NAME, "attempt": job.file.attempt, "rank": job.rank, "pid": os.getpid(), **fields}
    with (folder / "notes.jsonl").open("a") as log:  # O_APPEND: lines of several processes don't mix
        log.write(json.dumps(line) + "\n")


@rose.phase("rollout")
def rollout(progress: rose.Progress) -> None:
    note(phase="rollout", iteration=progress.iteration)
    time.sleep(0.02)
    while (folder / f"hold-{NAME}").exists():
        time.sleep(0.02)


@rose.phase("train")
def train(progress: rose.Progress) -> None:
    note(phase="train", iteration=progress.iteration)
    time.sleep(0.02)


@rose.runtime_hook
def iteration(progress: rose.Progress) -> None:
    rollout(progress)
    train(progress)
    print(f"rank {job.rank if job else 0} did {progress.iteration}", flush=True)


TOLD = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "NNODES",
    "NODE_RANK",
    "CUDA_VISIBLE_DEVICES",
)
note(
    told={name: os.environ.get(name) for name in TOLD},
    nodes=[[node.name, node.address, list(node.devices)] for node in job.file.nodes],
    folder=os.getcwd(),
    extra=os.environ.get("EXTRA"),
)
iteration()
