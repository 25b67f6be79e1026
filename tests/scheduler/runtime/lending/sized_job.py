"""A job of the tests whose rollouts are turns at the router of its environment, on more nodes than it needs.

``sized_job.py FOLDER SECONDS [URL ...]``. Its own engines are at the URLs, one on each node. Rank 0 asks for
turns for SECONDS in each rollout. Every rank adds a line for each iteration to FOLDER/NAME.jsonl: attempt,
rank, ranks in all, and rollout nodes.
"""

import json
import sys
import time
from pathlib import Path

import openai

import rose
from rose.scheduler.runtime.job.job import running_job
from rose.trainers.own_engines import OwnEngines

folder, SECONDS = Path(sys.argv[1]), float(sys.argv[2])
job = running_job()
assert job is not None
FILE, RANK = job.file, job.rank
engines = OwnEngines([[url] for url in sys.argv[3:]]) if sys.argv[3:] else None


@rose.phase("rollout", working_set=engines)
def rollout() -> None:
    until_s = time.monotonic() + SECONDS
    if RANK:
        return
    with openai.OpenAI() as client:
        while time.monotonic() < until_s:
            client.completions.create(model="scripted", prompt=[1, 2, 3], max_tokens=5)


@rose.phase("train")
def train() -> None: ...


@rose.runtime_hook
def iteration(progress: rose.Progress) -> None:
    assert progress.rollout_nodes is not None
    line = {
        "iteration": progress.iteration,
        "attempt": FILE.attempt,
        "rank": RANK,
        "num_ranks": FILE.num_ranks,
        "nodes": len(progress.rollout_nodes),
    }
    with (folder / f"{FILE.name}.jsonl").open("a") as log:  # O_APPEND: lines of several processes don't mix
        log.write(json.dumps(line) + "\n")
    rollout()
    train()


iteration()
