"""vLLM's event stream of a completion.

Owns: the events' shape, as far as it is used; cutting the stream into events.
Promises: the echo of a long prompt is never parsed.
Never does: judge what an event means (attempt.py).
"""

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from rose.scheduler.rollout.bodies import TokenIds, cut_ids

_DONE = b"[DONE]"


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Event(msgspec.Struct):
    """One event of vLLM's /v1/completions stream, as far as it is used."""

    model: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Event).decode
_DATA = b"data:"
_PROMPT_KEY = b'"prompt_token_ids"'


async def read_events(stream: AsyncIterator[bytes]) -> AsyncIterator[tuple[Event, TokenIds | None]]:
    """The events of a completion stream until [DONE], each with the prompt's ids if it carries them.

    Raises:
        ConnectionError: the stream broke off before [DONE].
        ValueError: an event is not JSON of that shape.
    """
    pieces: list[bytes] = []  # of a line that has not ended: a long prompt's echo comes in many
    has_prompt = False
    async for data in stream:
        pieces.append(data)
        if b"\n" not in data:
            continue
        text, start = b"".join(pieces), 0
        # One event a line: JSON holds no bare line feed. Not split(), which looks at each byte by itself.
        while (end := text.find(b"\n", start)) >= 0:
            line, start = text[start:end], end + 1
            if not line.startswith(_DATA):
                continue
            if line.endswith(_DONE) and line[len(_DATA) :].strip() == _DONE:
                return
            prompt_token_ids = None
            if not has_prompt and (cut := cut_ids(line, _PROMPT_KEY, is_trusted=True)) is not None:
                line, prompt_token_ids = cut
                has_prompt = True
            yield _decode(memoryview(line)[len(_DATA) :]), prompt_token_ids
        pieces = [text[start:]] if start < len(text) else []
    raise ConnectionError("the stream broke off")
