"""Sampled turns of a trainer, with log-probabilities, that outlive an abort and a restart.

Owns the retries. Promises that a turn goes on from the tokens that have arrived. Never measures.
"""

import asyncio
from collections.abc import Sequence

import aiohttp

from rose.errors import WorkerError
from rose.measure.completions import SESSION_HEADER, open_session, stream_completion
from rose.measure.records import RequestRecord

TURN_TIMEOUT_S = 120.0
"""A turn that has not ended by then fails the rollout: far above any stall the router repairs."""
RETRY_PAUSE_S = 0.2
_RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})


class TurnEndpoint:
    """/v1/completions with token-id prompts, on a router or on one worker; use within one event loop."""

    def __init__(self, url: str, model: str, *, turn_timeout_s: float = TURN_TIMEOUT_S) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._turn_timeout_s = turn_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, session_id: str, prompt_ids: Sequence[int], max_tokens: int) -> RequestRecord:
        """Retries what a busy or restarting endpoint answers; continues after an abort.

        Raises: WorkerError when the endpoint refuses the request or the turn does not end in time.
        """
        turn = RequestRecord(prompt=prompt_ids, max_tokens=max_tokens)
        try:
            async with asyncio.timeout(self._turn_timeout_s):
                while len(turn.token_ids) < max_tokens and turn.finish_reason in (None, "abort"):
                    await self._extend(turn, session_id)
        except TimeoutError:
            raise WorkerError(
                f"turn of {session_id} not done in {self._turn_timeout_s} s: {turn.error or turn.stop_reason}"
            ) from None
        return turn

    async def close(self) -> None:
        """Closes the connections; the endpoint may be used again."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _extend(self, turn: RequestRecord, session_id: str) -> None:
        """Makes one request for the turn's rest; pauses where it did not end the turn."""
        part = RequestRecord(max_tokens=turn.max_tokens - len(turn.token_ids))
        body = {
            "model": self._model,
            "prompt": [*turn.prompt, *turn.token_ids],
            "max_tokens": part.max_tokens,
            "temperature": 1.0,
            "logprobs": 0,
        }
        if self._session is None:
            self._session = open_session()
        await stream_completion(self._session, self._url, body, part, headers={SESSION_HEADER: session_id})
        if part.status not in (0, 200, *_RETRIED_STATUSES):
            raise WorkerError(f"{self._url} answered {part.error}")
        if len(part.logprobs) != len(part.token_ids):
            raise WorkerError(f"{len(part.token_ids)} tokens came with {len(part.logprobs)} logprobs")
        turn.token_ids += part.token_ids
        turn.logprobs += part.logprobs
        turn.error, turn.finish_reason, turn.stop_reason = part.error, part.finish_reason, part.stop_reason
        if turn.finish_reason in (None, "abort"):
            await asyncio.sleep(RETRY_PAUSE_S)
