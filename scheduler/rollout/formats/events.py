"""vLLM's event stream of a completion or a chat.

Owns: the shape of the events as far as the router uses it, cutting the stream into events, and Chunk, what an
event adds to an answer.
Promises: the echo of a long prompt is never parsed, and not copied where it is known already.
Never does: judge what an event means (turn/attempt/).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rose.scheduler.rollout.formats.bodies import TokenIds, cut_ids

COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
_DONE = b"[DONE]"


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None
    completion_tokens_details: Any = None
    """vLLM sends this for chats only, where a reasoning parser is set."""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: str | None = None


class Event(msgspec.Struct):
    """One event of a stream from vLLM's /v1/completions or /v1/chat/completions."""

    model: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The tokens and text that one streamed event adds to a generation."""

    text: str
    token_ids: Sequence[int]
    logprobs: Mapping[str, Any] | None = None
    prompt_token_ids: TokenIds | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: str | None = None
    """The rows of the attempt's tokens, with its last event (routed.py)."""
    role: str | None = None
    """The speaker of a chat, which its first event names."""
    is_parsed: bool = False
    """A parser in the worker made this chat's text, so it differs from the text of the tokens."""


def chunk_of(event: Event, prompt_token_ids: TokenIds | None) -> Chunk:
    """Reads an event that has a choice. A chat has its text in the choice's delta."""
    choice = event.choices[0]
    delta, token_ids = choice.delta, choice.token_ids or ()
    is_parsed = False
    if delta is not None:  # only a parser counts reasoning tokens or holds text back
        counts_reasoning = event.usage is not None and event.usage.completion_tokens_details is not None
        is_parsed = counts_reasoning or (bool(token_ids) and delta.content is None)
    return Chunk(
        text=(choice.text if delta is None else delta.content) or "",
        token_ids=token_ids,
        logprobs=choice.logprobs,
        prompt_token_ids=prompt_token_ids,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        routed_experts=choice.routed_experts,
        role=delta.role if delta is not None else None,
        is_parsed=is_parsed,
    )


_decode = msgspec.json.Decoder(Event).decode
_DATA = b"data:"
_PROMPT_KEY = b'"prompt_token_ids"'
_PROMPT_IDS = _PROMPT_KEY + b":["


async def read_events(
    stream: AsyncIterator[bytes], *, skips_prompt: bool = False
) -> AsyncIterator[tuple[Event, TokenIds | None]]:
    """Yields the events up to [DONE], each with the prompt's ids if it carries them.

    `skips_prompt`: the caller knows the prompt's ids, so they are skipped.

    Raises:
        ConnectionError: the stream broke off before [DONE].
        ValueError: an event is not JSON of this shape.
    """
    pieces: list[bytes] = []  # of an unfinished line: the echo of a long prompt arrives in many
    has_prompt = is_skipping = False
    async for data in stream:
        if is_skipping:
            if (end := data.find(b"]")) < 0:
                continue
            data, is_skipping = data[end:], False
        pieces.append(data)
        if skips_prompt and not has_prompt:
            pieces, is_skipping = _cut_echo(b"".join(pieces))
            has_prompt = len(pieces) > 1 or is_skipping
        if is_skipping or b"\n" not in pieces[-1]:
            continue
        text, start = b"".join(pieces), 0
        # Each line is one event, as JSON holds no bare line feed. split() would look at each byte by itself.
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


def _cut_echo(text: bytes) -> tuple[list[bytes], bool]:
    """Removes the prompt's ids as vLLM writes them. Returns (the rest in pieces, whether more ids follow)."""
    if (start := text.find(_PROMPT_IDS)) < 0:
        return [text], False
    start += len(_PROMPT_IDS)
    if (end := text.find(b"]", start)) < 0:
        return [text[:start]], True
    return [text[:start], text[end:]], False
