"""Streamed turns of a client that knows several routers, and reconnects once.

Owns: the turn, what has arrived of it and when. Promises: a retry says what has arrived, and every answer is
compared with the engine's own. Never: tries more often than once.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from lib.fleet.stub_engine import MODEL, tokens_after
from rose.http import JOB_HEADER, SO_FAR

_PATH = "/inference/v1/generate"


@dataclass(slots=True)
class FleetTurn:
    """One turn."""

    prompt: list[int]
    num_tokens: int
    job: str | None = None
    token_ids: list[int] = field(default_factory=list)
    last_at: float = 0.0
    """When the last token came."""
    reconnected: bool = False
    waited_s: float = 0.0
    """From the first router's end to the next token."""
    error: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the answer equals the engine's own."""
        return self.token_ids == tokens_after(self.prompt, self.num_tokens)

    def body(self) -> bytes:
        body = {
            "model": MODEL,
            "token_ids": self.prompt,
            "sampling_params": {"max_tokens": self.num_tokens, "detokenize": False},
            "stream": True,
        }
        return msgspec.json.encode(body | ({SO_FAR: self.token_ids} if self.token_ids else {}))


async def run(http: aiohttp.ClientSession, urls: Sequence[str], turn: FleetTurn) -> FleetTurn:
    """Runs a turn at the first router, and after a broken connection once more at the second."""
    for number, url in enumerate(urls):
        try:
            await _stream(http, f"{url}{_PATH}", turn)
            return turn
        except (aiohttp.ClientError, OSError) as error:
            if number == len(urls) - 1:
                turn.error = f"{url}: {error!r}"
                return turn
            turn.reconnected, turn.last_at = True, time.monotonic()
    return turn


async def _stream(http: aiohttp.ClientSession, url: str, turn: FleetTurn) -> None:
    headers = {"Content-Type": "application/json"}
    if turn.job is not None:
        headers[JOB_HEADER] = turn.job
    async with http.post(url, data=turn.body(), headers=headers) as response:
        if response.status != 200:
            turn.error = f"{url}: {response.status} {(await response.text())[:200]}"
            return
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                turn.error = f"{url}: {event['error']}"
                return
            _take(event["choices"][0]["token_ids"], turn)
    if len(turn.token_ids) < turn.num_tokens:
        raise aiohttp.ClientPayloadError("the stream broke off")


def _take(token_ids: list[int], turn: FleetTurn) -> None:
    now = time.monotonic()
    if token_ids and turn.reconnected and not turn.waited_s:
        turn.waited_s = now - turn.last_at
    turn.token_ids += token_ids
    turn.last_at = now
