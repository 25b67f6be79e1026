"""A job of the tests whose rollouts are turns at the router that its environment names.

``borrowing_job.py FOLDER``. Each iteration asks for a turn with OpenAI's client and one with ROSE's, and adds
a line for each to FOLDER/turns.jsonl. No training ends while there is a FOLDER/hold-turns.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import openai

import rose
from rose.trainers.turns import RouterTurns

PROMPT = [1, 2, 3]
turns_file = Path(sys.argv[1]) / "turns.jsonl"


async def own_turn() -> list[int]:
    turns = RouterTurns()
    try:
        return (await turns.complete("session", PROMPT, {"max_tokens": 5})).token_ids
    finally:
        await turns.close()


@rose.phase("rollout")
def rollout(iteration: int) -> None:
    with openai.OpenAI() as client:
        answer = client.completions.create(
            model="scripted", prompt=PROMPT, max_tokens=5, extra_body={"return_token_ids": True}
        )
    [choice] = answer.model_dump()["choices"]
    lines = [
        {"iteration": iteration, "tokens": choice["token_ids"], "spans": choice["rose"]["spans"]},
        {"iteration": iteration, "tokens": asyncio.run(own_turn())},
    ]
    with turns_file.open("a") as log:
        log.write("".join(f"{json.dumps(line)}\n" for line in lines))


@rose.phase("train")
def train(iteration: int) -> None:
    while turns_file.with_name("hold-turns").exists():
        time.sleep(0.02)


@rose.runtime_hook
def iteration(progress: rose.Progress) -> None:
    rollout(progress.iteration)
    train(progress.iteration)


iteration()
