"""Where a generation may be taken up again: not within a character.

Owns: finding the tokens at its end that make no whole character yet, and dropping them.
Promises: the text of both parts together is that of the unbroken run.
Never does: choose workers.

A character may take several tokens, and a worker gives no text before the last. vLLM 0.32's detokenizer is
primed with the prompt; where that ends within a character, the first text it gives is the whole prompt's.
"""

from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from rose.errors import WorkerError
from rose.scheduler.rollout.formats.resume import Accumulated
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.workers.registry import openai_headers
from rose.scheduler.rollout.workers.worker import Worker

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_TAIL = 16
"""Tokens that are looked at: the end of a text doesn't depend on more."""

_NO_TOKENIZER = (404, 405, 501)
"""Then its answers have no text either."""

Decode = Callable[[Sequence[int]], Awaitable[str]]


async def end_on_character(generation: Accumulated, decode: Decode, *, is_shown: bool) -> None:
    """Drop the tokens of an unfinished character.

    `is_shown`: the client has been sent the tokens, not their text alone.

    Raises:
        WorkerError: they can't be taken back.
    """
    count = await num_unfinished(generation.token_ids, decode)
    if count and is_shown:
        raise WorkerError("cut within a character, the first tokens of which were streamed")
    generation.drop_last(count)


async def num_unfinished(token_ids: Sequence[int], decode: Decode) -> int:
    """How many tokens at the end have given no text yet."""
    count = 0
    while count < len(token_ids):
        end = len(token_ids) - count
        if not (await decode(token_ids[max(0, end - _TAIL) : end])).endswith(_UNFINISHED):
            break
        count += 1
    return count


def decoder(http: aiohttp.ClientSession, config: RouterConfig, worker: Worker, model: object) -> Decode:
    """The worker's own decoding; it raises aiohttp.ClientError, TimeoutError."""
    timeout = aiohttp.ClientTimeout(total=worker.stall_allowance_s(config))

    async def decode(token_ids: Sequence[int]) -> str:
        body = {"tokens": list(token_ids)} | ({"model": model} if model is not None else {})
        url, headers = f"{worker.spec.url}/detokenize", openai_headers(config)
        async with http.post(url, json=body, headers=headers, timeout=timeout) as response:
            if response.status in _NO_TOKENIZER:
                return ""
            response.raise_for_status()
            return str((await response.json())["prompt"])

    return decode
