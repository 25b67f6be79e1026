"""Multi-turn rollouts over HTTP: games on one side, an OpenAI-style completion endpoint on the other.

Owns: the token ledger of a trajectory (what was sent, what came back, who wrote which token), and the calls
that extend it. Promises: the ids sent in a turn are exactly prompt + completion so far, never re-tokenized,
so a worker's prefix cache always matches; a generated token is masked 1, a token of the environment 0; an
aborted turn goes on from its partial tokens. Never trains, never routes.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
from transformers import PreTrainedTokenizerBase

from rose.demo.frozenlake import FrozenLakeGame
from rose.errors import WorkerError
from rose.measure.completions import SESSION_HEADER, open_session, stream_completion
from rose.measure.records import RequestRecord

TURN_TIMEOUT_S = 120.0
"""A turn that has not ended by then fails the rollout: far above any stall the router repairs."""
RETRY_PAUSE_S = 0.2
_RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})


class Endpoint(Protocol):
    """Where turns are sent."""

    async def complete(self, session_id: str, prompt_ids: Sequence[int], max_tokens: int) -> RequestRecord:
        """One turn of the trajectory ``session_id``."""
        ...

    async def close(self) -> None:
        """Drops the connections."""
        ...


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One finished game as tokens: ``completion_ids`` is everything after the first prompt."""

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    num_turns: int = 0
    reward: float = 0.0
    is_success: bool = False

    @property
    def num_generated_tokens(self) -> int:
        """Tokens the model wrote."""
        return sum(self.env_mask)

    def append_reply(self, reply: RequestRecord) -> None:
        """Adds generated tokens."""
        self.completion_ids += reply.token_ids
        self.logprobs += reply.logprobs
        self.env_mask += [1] * len(reply.token_ids)

    def append_feedback(self, token_ids: Sequence[int]) -> None:
        """Adds tokens the environment wrote; their logprobs are 0 and never enter the loss."""
        self.completion_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.env_mask += [0] * len(token_ids)


async def play(
    game: FrozenLakeGame,
    tokenizer: PreTrainedTokenizerBase,
    endpoint: Endpoint,
    *,
    session_id: str,
    max_reply_tokens: int,
) -> Trajectory:
    """Plays ``game`` to its end, one completion per turn."""
    trajectory = Trajectory(prompt_ids=encode(tokenizer, game.opening()))
    while not game.is_done:
        context = [*trajectory.prompt_ids, *trajectory.completion_ids]
        reply = await endpoint.complete(session_id, context, max_reply_tokens)
        trajectory.append_reply(reply)
        feedback = game.play(str(tokenizer.decode(reply.token_ids)))
        trajectory.append_feedback(encode(tokenizer, feedback))
    trajectory.num_turns = game.num_turns
    trajectory.reward, trajectory.is_success = game.reward, game.is_success
    return trajectory


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of ``text``, nothing added around them."""
    return list(tokenizer.encode(text, add_special_tokens=False))


class HttpEndpoint:
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
