"""A job whose rollouts run on a ROSE engine on the first of two nodes: timed_job.py URL

Each rollout sends prompts of PROMPT_TOKENS tokens.
"""

import sys

from probes import prompt

import rose
from rose.node.control import EngineControl
from rose.trainers.own_engines import OwnEngines

PROMPT_TOKENS, MAX_TOKENS = 50, 16
NUM_TURNS = 3


def main(url: str) -> None:
    engine, engines = EngineControl(url, "tiny"), OwnEngines([[url], []])

    @rose.phase("rollout", working_set=engines, move_tail=engines.move_tail)
    def rollout(progress: rose.Progress) -> None:
        for number in range(NUM_TURNS):
            tokens = prompt(f"timed-{progress.iteration}-{number}", PROMPT_TOKENS)
            engine.complete([tokens], progress.forced_tokens or MAX_TOKENS)

    @rose.phase("train")
    def train() -> None: ...

    @rose.runtime_hook
    def iteration(progress: rose.Progress) -> None:
        rollout(progress)
        train()

    iteration()


if __name__ == "__main__":
    main(sys.argv[1])
