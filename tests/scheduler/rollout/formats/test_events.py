"""A completion's event stream, cut anywhere, gives every token once; the prompt's echo is read or skipped."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.scheduler.rollout.formats.bodies import TokenIds
from rose.scheduler.rollout.formats.events import read_events
from rose.scheduler.rollout.formats.resume import known_prompt

PROMPT = list(range(100, 160))
TEXT = 'a "prompt_token_ids":[7] ] \n b'


def stream_of(prompt: list[int] | None, separators: tuple[str, str], cuts: list[int]) -> list[bytes]:
    """What vLLM sends, in pieces that end at `cuts`."""
    choices: list[dict[str, Any]] = [{"text": TEXT, "token_ids": [1, 2], "prompt_token_ids": prompt}]
    choices += [{"text": "", "token_ids": [3], "finish_reason": "length"}]
    events = [json.dumps({"choices": [choice]}, separators=separators) for choice in choices]
    whole = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
    ends = [*sorted({cut % len(whole) for cut in cuts} - {0}), len(whole)]
    return [whole[a:b] for a, b in zip([0, *ends], ends, strict=False)]


async def read(pieces: list[bytes], skips_prompt: bool) -> list[tuple[str | None, Any, TokenIds | None]]:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    events = [each async for each in read_events(stream(), skips_prompt=skips_prompt)]
    return [(event.choices[0].text, event.choices[0].token_ids, prompt) for event, prompt in events]


@given(
    prompt=st.sampled_from([PROMPT, [5], None]),
    separators=st.sampled_from([(",", ":"), (", ", ": ")]),
    cuts=st.lists(st.integers(0, 1000), max_size=8),
    skips_prompt=st.booleans(),
)
def test_a_stream_is_read_alike_however_it_is_cut(
    prompt: list[int] | None, separators: tuple[str, str], cuts: list[int], skips_prompt: bool
) -> None:
    pieces = stream_of(prompt, separators, cuts)
    first, second = asyncio.run(read(pieces, skips_prompt))
    assert (first[:2], second) == ((TEXT, [1, 2]), ("", [3], None))
    if not skips_prompt:
        assert (first[2].listed() if first[2] is not None else None) == prompt


def test_a_stream_that_ends_within_the_prompt_has_broken_off() -> None:
    whole = b"".join(stream_of(PROMPT, (",", ":"), []))
    with pytest.raises(ConnectionError):
        asyncio.run(read([whole[: whole.index(b"120")]], skips_prompt=True))


@pytest.mark.parametrize(
    ("body", "is_known"),
    [
        ({"prompt": TokenIds(b"[1,2]")}, True),
        ({"prompt": TokenIds(b"[1,2]"), "truncate_prompt_tokens": None}, True),
        ({"prompt": TokenIds(b"[1,2]"), "truncate_prompt_tokens": 1}, False),
        ({"prompt": "text"}, False),
    ],
)
def test_ids_of_texts_and_truncated_prompts_come_from_the_worker(
    body: dict[str, Any], is_known: bool
) -> None:
    assert known_prompt(body) == (body["prompt"] if is_known else None)
