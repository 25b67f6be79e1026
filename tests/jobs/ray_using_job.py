"""A job of the tests that uses Ray: each rollout is one remote call. ``ray_using_job.py FOLDER NUM_CPUS``."""

import json
import os
import sys
from pathlib import Path

import ray

import rose
from rose.scheduler.runtime.job.job import running_job

folder, num_cpus = Path(sys.argv[1]), int(sys.argv[2])
job = running_job()
assert job is not None
context = ray.init(log_to_driver=False)
assert ray.cluster_resources()["CPU"] == num_cpus


@ray.remote
def work() -> int:
    return os.getpid()


@rose.phase("rollout")
def rollout(iteration: int) -> None:
    note = {
        "address": context.address_info["address"],
        "worker": ray.get(work.remote()),
        "session": os.getsid(0),
        "iteration": iteration,
    }
    assert job is not None
    with (folder / f"{job.file.name}.jsonl").open("a") as log:
        log.write(json.dumps(note) + "\n")


@rose.phase("train")
def train(iteration: int) -> None:
    """Needs no Ray."""


@rose.runtime_hook
def iteration(progress: rose.Progress) -> None:
    rollout(progress.iteration)
    train(progress.iteration)


iteration()
