"""The prompt's token ids, left out of a stream whose reader knows them.

Owns one ASGI ``send``. Promises: only what ``NO_PROMPT_IDS_HEADER`` asks for is left out; all else passes
as it comes. Never: parses JSON. Why: vLLM streams the ids of tokens only together with those of the prompt,
190 KB at 32k tokens.
"""

from starlette.types import Message, Scope, Send

from rose.http import NO_PROMPT_IDS_HEADER

_ASKED_FOR = NO_PROMPT_IDS_HEADER.lower().encode()
_CONTENT_TYPE = b"content-type"
_KEY = b'"prompt_token_ids":'


def without_prompt_ids(scope: Scope, send: Send) -> Send:
    """``send`` for a request's answer: itself where the request doesn't ask for less."""
    if not any(name == _ASKED_FOR for name, _ in scope["headers"]):
        return send
    is_looking = False

    async def cut(message: Message) -> None:
        nonlocal is_looking
        if message["type"] == "http.response.start":
            # An answer in one piece has said how long it is.
            is_looking = any(_is_event_stream(name, value) for name, value in message["headers"])
        elif is_looking and (found := _cut_ids(message.get("body", b""))) is not None:
            is_looking = False  # the first event that has them is the only one
            message = {**message, "body": found}
        await send(message)

    return cut


def _is_event_stream(name: bytes, value: bytes) -> bool:
    return name.lower() == _CONTENT_TYPE and value.startswith(b"text/event-stream")


def _cut_ids(event: bytes) -> bytes | None:
    """The event with null for the ids. None: it has none, or not all of them.

    No text can look like the key: JSON escapes the quotes in it.
    """
    if (start := event.find(_KEY + b"[")) < 0:
        return None
    start += len(_KEY)
    end = event.find(b"]", start)
    return event[:start] + b"null" + event[end + 1 :] if end >= 0 else None
