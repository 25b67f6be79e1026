"""Leaves the prompt's token ids out of a stream whose reader knows them.

Why: vLLM streams token ids only together with those of the prompt, which are 190 KB at 32k tokens. Promises
that nothing else changes, and that answers to requests without ``NO_PROMPT_IDS_HEADER`` pass as they are.
Never parses JSON.
"""

from starlette.types import Message, Scope, Send

from rose.http import NO_PROMPT_IDS_HEADER

_ASKED_FOR = NO_PROMPT_IDS_HEADER.lower().encode()
_CONTENT_TYPE = b"content-type"
_KEY = b'"prompt_token_ids":'


def without_prompt_ids(scope: Scope, send: Send) -> Send:
    """Returns the ``send`` for a request's answer, which is ``send`` itself without the header."""
    if not any(name == _ASKED_FOR for name, _ in scope["headers"]):
        return send
    is_looking = False

    async def cut(message: Message) -> None:
        nonlocal is_looking
        if message["type"] == "http.response.start":
            # Only a stream is cut: an answer in one piece has announced its length.
            is_looking = any(_is_event_stream(name, value) for name, value in message["headers"])
        elif is_looking and (found := _cut_ids(message.get("body", b""))) is not None:
            is_looking = False  # only one event has them
            message = {**message, "body": found}
        await send(message)

    return cut


def _is_event_stream(name: bytes, value: bytes) -> bool:
    return name.lower() == _CONTENT_TYPE and value.startswith(b"text/event-stream")


def _cut_ids(event: bytes) -> bytes | None:
    """Returns the event with null in place of the ids, or None if it has none or not all of them.

    No text can look like the key, because JSON escapes the quotes in it.
    """
    if (start := event.find(_KEY + b"[")) < 0:
        return None
    start += len(_KEY)
    end = event.find(b"]", start)
    return event[:start] + b"null" + event[end + 1 :] if end >= 0 else None
