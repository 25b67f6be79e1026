"""A job of the tests whose rollouts are turns at the router, and whose trainer publishes weights.

``lent_job.py FOLDER RELAY RUN MODEL``. Each iteration asks for turns, adds a line for each to
FOLDER/RUN.jsonl, and publishes the weights of MODEL as the run's next version. A first version is published
before the first turn, as an engine may still have another run's weights. No training ends while there is a
FOLDER/hold-RUN.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
from safetensors.torch import load_file

import rose
from rose.transfer.publish.publisher import WeightPublisher

FOLDER, RELAY, RUN, MODEL = sys.argv[1:]
NUM_TURNS, MAX_TOKENS = 6, 24
out = Path(FOLDER) / f"{RUN}.jsonl"
trainer = WeightPublisher(load_file(Path(MODEL) / "model.safetensors"), RELAY, RUN, dtype=None)


def turn(client: openai.OpenAI, number: int) -> dict[str, Any]:
    answer = client.completions.create(
        model="tiny",
        prompt=[3 + number, 5, 7, 11],
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    [choice] = answer.model_dump()["choices"]
    return {"tokens": choice["token_ids"], "spans": choice["rose"]["spans"]}


@rose.phase("rollout")
def rollout(iteration: int) -> None:
    with openai.OpenAI(timeout=600) as client, ThreadPoolExecutor(NUM_TURNS) as threads:
        answers = list(threads.map(lambda number: turn(client, number), range(NUM_TURNS)))
    with out.open("a") as log:
        log.write("".join(f"{json.dumps({'iteration': iteration, **answer})}\n" for answer in answers))


@rose.phase("train")
def train(_iteration: int) -> None:
    trainer.publish()
    while out.with_name(f"hold-{RUN}").exists():
        time.sleep(0.02)


@rose.runtime_hook
def iteration(progress: rose.Progress) -> None:
    rollout(progress.iteration)
    train(progress.iteration)


try:
    trainer.publish()
    iteration()
finally:
    trainer.close()
