"""A thin streaming client for /v1/completions with token-id prompts.

Owns the reading of the event stream. Promises a time stamp per token as it reached this process,
and that what arrived is kept whatever happens next. Never retries.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rose.http import KEEPALIVE_S

Clock = Callable[[], float]

READ_BUFFER_BYTES = 1 << 20
"""The first event echoes the prompt's ids on one line; aiohttp's own limit is 64 KiB."""


@dataclass(slots=True)
class Completion:
    """What has arrived of one answer so far; filled in place, so a cancelled stream keeps its part."""

    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    status: int = 0
    error: str | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None


def open_session() -> aiohttp.ClientSession:
    """A session without a connection limit or a total timeout: the load decides both."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        read_bufsize=READ_BUFFER_BYTES,
    )


async def stream_completion(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    completion: Completion,
    *,
    now: Clock,
    headers: Mapping[str, str] | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> None:
    """POST ``body`` and fill ``completion`` until the stream ends; failures land in ``completion.error``."""
    payload = {**body, "stream": True, "return_token_ids": True}
    try:
        async with session.post(f"{url}/v1/completions", json=payload, headers=headers) as response:
            completion.status = response.status
            if response.status != 200:
                completion.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                if line.startswith(b"data: "):
                    _take_event(line[6:].strip(), completion, now, on_tokens)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        completion.error = f"{type(error).__name__}: {error}"
        return
    if completion.finish_reason is None and completion.error is None:
        completion.error = "the stream ended without a finish reason"


def _take_event(
    event: bytes, completion: Completion, now: Clock, on_tokens: Callable[[int], None] | None
) -> None:
    if event == b"[DONE]":
        return
    at_s = now()
    message: dict[str, Any] = json.loads(event)
    if "error" in message:
        completion.error = json.dumps(message["error"])[:300]
        return
    for choice in message["choices"]:
        token_ids = choice.get("token_ids") or ()
        if token_ids:
            completion.token_ids.extend(token_ids)
            completion.token_times_s.extend([at_s] * len(token_ids))
            if on_tokens is not None:
                on_tokens(len(token_ids))
        if choice.get("finish_reason") is not None:
            completion.finish_reason = choice["finish_reason"]
            stop_reason = choice.get("stop_reason")
            completion.stop_reason = str(stop_reason) if stop_reason is not None else None
