"""New weights under running turns and in mode pinned, for bench_failover.py.

Owns the updates and the truth about each token. Never takes the router's or an engine's word for it.
"""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.faults.turns import (
    LONG_TOKENS,
    NUM_TURNS,
    PROMPT_TOKENS,
    SHORT_TOKENS,
    RunningEngine,
    Samples,
    begin_turns,
)
from lib.load.turns import RouterClient, Turn, random_prompt, until_so
from rose.errors import WorkerError
from rose.measure.rig import Rig
from rose.messages import WeightUpdate
from rose.transfer.format.checkpoint import checkpoint_state_hash

SAME_LOGPROB = 1e-4
"""Two log-probabilities of the same weights differ by less, those of a token under other weights by more:
where they don't, the token doesn't tell."""


async def update(
    client: RouterClient,
    engines: Sequence[RunningEngine],
    weights: Sequence[Path],
    name: str,
    samples: Samples,
) -> None:
    """New weights under running turns, then in mode pinned. Both engines end with the first weights."""
    mine, other = weights
    for engine in engines:
        await give(client, engine, mine, 1)
    await sees(client, engines, 1)
    _, tasks = await begin_turns(client, engines[0], name)
    for engine in engines:
        await give(client, engine, other, 2)
    running = await asyncio.gather(*tasks)
    await sees(client, engines, 2)
    pinned = await _pin(client, engines[0], mine, name)
    # The first engine has my weights again, the other one those of version 2.
    for turn in (*running, *pinned):
        if not turn.is_whole(LONG_TOKENS if turn in running else SHORT_TOKENS):
            raise WorkerError(f"a turn failed while weights changed: {turn.error or turn.finish_reason}")
        made_by = await _true_weights(client, engines, turn)
        known = [
            (tag, is_other)
            for tag, is_other in zip(turn.versions, made_by, strict=True)
            if is_other is not None
        ]
        samples.num_untold += len(made_by) - len(known)
        samples.tags += [(tag == "bench/2") == is_other for tag, is_other in known]
        if turn not in running:
            samples.num_pinned += len(known)
            samples.num_stale += sum(not is_other for _, is_other in known)
    await give(client, engines[1], mine, 3)
    await sees(client, engines, 3)


async def _pin(client: RouterClient, changing: RunningEngine, weights: Path, name: str) -> list[Turn]:
    """Second turns of sessions that began with version 2, while and after one engine gets version 3."""
    await client.set_version_mode("pinned")
    sessions = [f"{name}-session-{i}" for i in range(2 * NUM_TURNS)]
    first = await asyncio.gather(
        *(client.run(random_prompt(session, PROMPT_TOKENS), SHORT_TOKENS, session) for session in sessions)
    )
    prompts = [[*turn.prompt, *turn.token_ids, 1, 2, 3] for turn in first]
    ready = list(zip(prompts, sessions, strict=True))
    update = asyncio.create_task(give(client, changing, weights, 3))
    meanwhile = []
    for prompt, session in ready[:NUM_TURNS]:
        meanwhile.append(client.begin(prompt, SHORT_TOKENS, session)[1])
        await asyncio.sleep(0.01)
    await update
    after = [client.begin(prompt, SHORT_TOKENS, session)[1] for prompt, session in ready[NUM_TURNS:]]
    second = await asyncio.gather(*meanwhile, *after)
    await client.set_version_mode("latest")
    return second


def other_weights(rig: Rig) -> Path:
    """Returns a checkpoint of the rollout model's shape. torch stays out of this process."""
    folder = rig.folder / "other"
    code = (
        "import sys; from pathlib import Path; from rose.measure.models import make_rollout_model; "
        "make_rollout_model(Path(sys.argv[1]), seed=1)"
    )
    made = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        raise WorkerError(f"the other weights could not be made:\n{made.stderr}")
    return folder


async def give(client: RouterClient, engine: RunningEngine, weights: Path, number: int) -> None:
    """Hands weights to an engine as a subscriber does."""
    (path,) = weights.glob("*.safetensors")
    state_hash = str(await asyncio.to_thread(checkpoint_state_hash, path))
    update = WeightUpdate(version=f"bench/{number}", path=str(path), state_hash=state_hash)
    await client.call("POST", f"{engine.control.url}/rose/v1/weights", update.model_dump())


async def sees(client: RouterClient, engines: Sequence[RunningEngine], number: int) -> None:
    async def is_so() -> bool:
        workers = [await client.worker(engine.id) for engine in engines]
        # The new version is told while the update still is: only after it are there turns for the worker.
        has_version = all(worker["weight_version"] == f"bench/{number}" for worker in workers)
        return has_version and not any(worker["updating"] for worker in workers)

    await until_so(is_so, f"the router knows of version {number}")


async def _true_weights(
    client: RouterClient, engines: Sequence[RunningEngine], turn: Turn
) -> list[bool | None]:
    mine, other = [await logprobs(client, engine, turn.prompt, turn.token_ids) for engine in engines]
    return made_by_other(turn.logprobs, mine, other)


def made_by_other(
    carried: Sequence[float], mine: Sequence[float], other: Sequence[float]
) -> list[bool | None]:
    """Returns for each token whether the other weights made it; None where both may have.

    ``carried``: the log-probabilities that came with the tokens. ``mine``, ``other``: those by each weights.
    """
    found: list[bool | None] = []
    for came, by_mine, by_other in zip(carried, mine, other, strict=True):
        is_mine, is_other = abs(came - by_mine) < SAME_LOGPROB, abs(came - by_other) < SAME_LOGPROB
        found.append(is_other if is_mine != is_other else None)
    return found


async def logprobs(
    client: RouterClient, engine: RunningEngine, prompt: Sequence[int], token_ids: Sequence[int]
) -> list[float]:
    """Returns the log-probability that an engine's weights give to each token of an answer."""
    tokens = [*prompt, *token_ids]
    body: dict[str, Any] = {"model": engine.control.model, "prompt": tokens, "max_tokens": 1}
    answer = await client.call(
        "POST", f"{engine.control.url}/v1/completions", {**body, "prompt_logprobs": 0, "temperature": 0.0}
    )
    told = answer["choices"][0]["prompt_logprobs"]
    return [told[i][str(tokens[i])]["logprob"] for i in range(len(prompt), len(tokens))]
