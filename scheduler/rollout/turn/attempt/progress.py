"""Whether a worker still makes tokens, for requests whose own answers don't show it.

Owns: the probe: one token of a one-token prompt. Promises: if a worker and then its probe stay silent, the
worker counts as stalled within twice `first_token_s`. A worker on which any turn makes tokens is not probed.
Never does: reroute (rerouting.py).

A stopped engine keeps answering /health and even accepts requests, so only a token proves progress.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rose.scheduler.rollout.formats.bodies import Json, encode
from rose.scheduler.rollout.formats.events import COMPLETIONS_PATH
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.workers.watch import Watch
from rose.scheduler.rollout.workers.wire import Wire
from rose.scheduler.rollout.workers.worker import Worker


@asynccontextmanager
async def probed(
    wire: Wire, worker: Worker, watch: Watch, config: RouterConfig, model: str | None
) -> AsyncIterator[None]:
    """Lets the watch run out unless the worker makes tokens, for this request or for any other."""
    watch.allow(2 * config.first_token_s)
    task = asyncio.create_task(_probe_when_silent(wire, worker, watch, config.first_token_s, model))
    try:
        yield
    finally:
        task.cancel()


async def _probe_when_silent(
    wire: Wire, worker: Worker, watch: Watch, silence_s: float, model: str | None
) -> None:
    while True:
        before = worker.num_tokens
        await asyncio.sleep(silence_s)
        if worker.num_tokens > before or await _answers_probe(wire, worker, model):
            watch.allow(2 * silence_s)


async def _answers_probe(wire: Wire, worker: Worker, model: str | None) -> bool:
    """Waits for a token. Returns False if the connection broke; the watch ends an endless wait."""
    body: Json = {"prompt": [0], "max_tokens": 1, "stream": True}
    if model is not None:
        body["model"] = model
    url = worker.turn_urls[COMPLETIONS_PATH]
    try:
        answer = await wire.post(url, worker.openai_headers, [encode(body)])
    except OSError:
        return False
    try:
        async for _ in answer.pieces():
            return True  # an error is an answer, too, and tells nothing of the engine
        return False
    except OSError:
        return False
    finally:
        wire.done(url, answer)
