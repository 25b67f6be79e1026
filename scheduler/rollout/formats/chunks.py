"""What one event of a worker's stream adds to an answer.

Owns: Chunk, and reading one from an event.
Promises: plain values.
Never does: merge chunks (resume.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rose.scheduler.rollout.formats.bodies import TokenIds
from rose.scheduler.rollout.formats.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The tokens and text that one streamed event adds to a generation."""

    text: str
    token_ids: Sequence[int]
    logprobs: Mapping[str, Any] | None = None
    prompt_token_ids: TokenIds | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
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
        role=delta.role if delta is not None else None,
        is_parsed=is_parsed,
    )
