"""The client of /v1/completions with token-id prompts: it streams, so that every token has a time.

Owns the reading of the event stream. Promises a time stamp per token as it reached this process, and that
what arrived is kept whatever happens next. Never retries.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from rose.http import KEEPALIVE_S
from rose.measure.records import RequestRecord

Clock = Callable[[], float]

SESSION_HEADER = "X-Session-ID"
READ_BUFFER_BYTES = 1 << 20
"""The first event echoes the prompt's ids on one line; aiohttp's own limit is 64 KiB."""


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
    record: RequestRecord,
    *,
    now: Clock = time.monotonic,
    headers: Mapping[str, str] | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> None:
    """POST ``body`` and fill ``record`` until the stream ends; failures land in ``record.error``."""
    payload = {**body, "stream": True, "return_token_ids": True}
    record.sent_s = now()
    try:
        async with session.post(f"{url}/v1/completions", json=payload, headers=headers) as response:
            record.status = response.status
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    num_tokens = _take_event(json.loads(line[6:]), record, now())
                    if num_tokens and on_tokens is not None:
                        on_tokens(num_tokens)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"
        return
    finally:
        record.ended_s = now()
    if record.finish_reason is None and record.error is None:
        record.error = "the stream ended without a finish reason"


def _take_event(message: dict[str, Any], record: RequestRecord, at_s: float) -> int:
    """Adds an event to the record; returns the number of its tokens."""
    if "error" in message:
        record.error = json.dumps(message["error"])[:300]
        return 0
    if message.get("usage") is not None:
        details = message["usage"].get("prompt_tokens_details")
        record.num_cached_tokens = details["cached_tokens"] if details is not None else None
    before = len(record.token_ids)
    for choice in message["choices"]:
        token_ids = choice.get("token_ids") or ()
        record.token_ids.extend(token_ids)
        record.token_times_s.extend([at_s] * len(token_ids))
        if choice.get("logprobs") is not None:
            record.logprobs.extend(choice["logprobs"]["token_logprobs"])
        if choice.get("finish_reason") is not None:
            record.finish_reason, record.rose = choice["finish_reason"], choice.get("rose", {})
            stop_reason = choice.get("stop_reason")
            record.stop_reason = str(stop_reason) if stop_reason is not None else None
    return len(record.token_ids) - before
