"""Ending a cut generation on a whole character, so that another worker can resume it.

Owns: finding and dropping the tokens at the end that don't make a whole character yet.
Promises: the text of both parts together equals the text of an unbroken run.
Never does: choose workers.

A character may consist of several tokens, and a worker gives its text with the last one. vLLM 0.32 primes its
detokenizer with the prompt, so if the prompt ends within a character, the first text is that of the whole
prompt.
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
"""The end of a text depends on no more tokens than these."""
_NO_TOKENIZER = (404, 405, 501)
"""A worker without a tokenizer answers so, and its completions hold no text either."""

Decode = Callable[[Sequence[int]], Awaitable[str]]


async def end_on_character(generation: Accumulated, decode: Decode, *, are_shown: bool) -> None:
    """Drops the tokens of an unfinished character.

    `are_shown`: the client has been sent the tokens and not just their text.

    Raises:
        WorkerError: the client has been sent tokens that would have to be dropped.
    """
    count = await num_unfinished(generation.token_ids, decode)
    if count and are_shown:
        raise WorkerError(
            "the worker was lost when the client had received a part of a character; send the turn again"
        )
    generation.drop_last(count)


async def num_unfinished(token_ids: Sequence[int], decode: Decode) -> int:
    """Counts the tokens at the end that have given no text yet."""
    count = 0
    while count < len(token_ids):
        end = len(token_ids) - count
        if not (await decode(token_ids[max(0, end - _TAIL) : end])).endswith(_UNFINISHED):
            break
        count += 1
    return count


def decoder(http: aiohttp.ClientSession, config: RouterConfig, worker: Worker, model: object) -> Decode:
    """Returns the worker's own decoding, which may raise aiohttp.ClientError and TimeoutError."""
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
