"""Multi-turn rollouts over HTTP: games on one side, an OpenAI-style completion endpoint on the other.

Owns: the token ledger of a trajectory (what was sent, what came back, who wrote which token), and the calls
that extend it. Promises: the ids sent in a turn are exactly prompt + completion so far, never re-tokenized,
so a worker's prefix cache always matches; a generated token is masked 1, a token of the environment 0; an
aborted turn goes on from its partial tokens. Never trains, never routes.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
from transformers import PreTrainedTokenizerBase

from rose.demo.frozenlake import FrozenLakeGame
from rose.errors import WorkerError
from rose.http import KEEPALIVE_S

SESSION_HEADER = "X-Session-ID"
TURN_TIMEOUT_S = 120.0
"""A turn that has not ended by then fails the rollout: far above any stall the router repairs."""
RETRY_PAUSE_S = 0.2
_RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})


@dataclass(slots=True, kw_only=True)
class Reply:
    """What the model said in one turn; logprobs[i] belongs to token_ids[i]."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Endpoint(Protocol):
    """Where turns are sent."""

    async def complete(self, session_id: str, prompt_ids: Sequence[int], max_tokens: int) -> Reply:
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

    def append_reply(self, reply: Reply) -> None:
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

    def __init__(
        self,
        url: str,
        model: str,
        *,
        temperature: float = 1.0,
        key: str | None = None,
        turn_timeout_s: float = TURN_TIMEOUT_S,
    ) -> None:
        self._url = url.rstrip("/") + "/v1/completions"
        self._model = model
        self._temperature = temperature
        self._headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        self._turn_timeout_s = turn_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, session_id: str, prompt_ids: Sequence[int], max_tokens: int) -> Reply:
        """Retries what a busy or restarting endpoint answers; continues after an abort.

        Raises: WorkerError when the endpoint refuses the request or the turn does not end in time.
        """
        deadline_s = time.monotonic() + self._turn_timeout_s
        reply = Reply()
        while True:
            problem = await self._extend(reply, session_id, prompt_ids, max_tokens)
            if problem is None or len(reply.token_ids) >= max_tokens:
                return reply
            if time.monotonic() >= deadline_s:
                raise WorkerError(f"turn of {session_id} not done in {self._turn_timeout_s} s: {problem}")
            await asyncio.sleep(RETRY_PAUSE_S)

    async def close(self) -> None:
        """Closes the connections; the endpoint may be used again."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _extend(
        self, reply: Reply, session_id: str, prompt_ids: Sequence[int], max_tokens: int
    ) -> str | None:
        """One request; returns None when the turn is complete, else why to try again."""
        body = {
            "model": self._model,
            "prompt": [*prompt_ids, *reply.token_ids],
            "max_tokens": max_tokens - len(reply.token_ids),
            "temperature": self._temperature,
            "logprobs": 0,
            "return_token_ids": True,
        }
        try:
            async with self._open().post(
                self._url, json=body, headers={**self._headers, SESSION_HEADER: session_id}
            ) as response:
                if response.status in _RETRIED_STATUSES:
                    return f"HTTP {response.status}"
                if response.status != 200:
                    text = (await response.text())[:300]
                    raise WorkerError(f"{self._url} answered HTTP {response.status}: {text}")
                choice: dict[str, Any] = (await response.json())["choices"][0]
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        return _take_choice(reply, choice)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=self._turn_timeout_s),
            )
        return self._session


def _take_choice(reply: Reply, choice: dict[str, Any]) -> str | None:
    token_ids: list[int] = choice["token_ids"] or []
    scored = choice["logprobs"]["token_logprobs"] if choice.get("logprobs") else []
    if len(scored) != len(token_ids):
        raise WorkerError(f"{len(token_ids)} tokens came with {len(scored)} logprobs")
    reply.token_ids += token_ids
    reply.logprobs += [0.0 if value is None else float(value) for value in scored]
    if choice["finish_reason"] == "abort":
        return f"aborted: {choice.get('stop_reason')}"
    return None
