"""A job whose rollouts run on a ROSE engine, beside another job: paired_job.py URL LOG OTHERS

Appends a JSON line to LOG for each turn: what the engine answered, the job's share of memory, and the
engine's slabs after the turn. Begins once the other job has written OTHERS: it may take long to start.
"""

import json
import sys
import time
from pathlib import Path

from probes import prompt

import rose
from rose.node.control import EngineControl
from rose.trainers.own_engines import OwnEngines

NUM_TURNS = 12
TOKENS = 8


def main(url: str, log: Path, others: Path) -> None:
    engine, engines = EngineControl(url, "tiny"), OwnEngines([[url]])

    @rose.phase("rollout", working_set=engines)
    def rollout(progress: rose.Progress) -> None:
        for number in range(NUM_TURNS):
            share = progress.memory_share
            [(tokens, _)] = engine.complete([prompt(f"paired-{number}", 200)], TOKENS)
            status = engine.status()
            turn = {
                "number": number,
                "tokens": tokens,
                "share": share,
                "owned": status.kv_slabs_owned,
                "budget": status.kv_slabs_budget,
            }
            with log.open("a") as lines:
                lines.write(json.dumps(turn) + "\n")
            progress.step(1, 1)

    @rose.phase("train")
    def train(progress: rose.Progress) -> None:
        progress.step(64)

    @rose.runtime_hook
    def iteration(progress: rose.Progress) -> None:
        rollout(progress)
        train(progress)

    while not others.exists():
        time.sleep(0.01)
    iteration()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
