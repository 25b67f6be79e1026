"""Streams turns through a router and keeps when each token came; asks the router about its workers.

Owns the calls of /workers and /admin. Promises that waiting for a condition ends with an error.
Never retries, never judges.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rose.errors import WorkerError
from rose.measure.completions import SESSION_HEADER, open_session, stream_completion
from rose.measure.models import ROLLOUT_SPEC
from rose.measure.records import RequestRecord
from rose.node.control import completion_body

PATIENCE_S = 60.0
POLL_S = 0.02


class Turn(RequestRecord):
    """One streamed turn, with what the router says of it."""

    @property
    def workers(self) -> list[str]:
        """The workers that made its tokens, in order."""
        return [span["worker"] for span in self.rose.get("spans", ())]

    @property
    def versions(self) -> list[str | None]:
        """The version that each token is tagged with."""
        spans = self.rose.get("spans", ())
        return [span["weight_version"] for span in spans for _ in range(span["tokens"])]

    def is_whole(self, num_tokens: int) -> bool:
        """Returns whether it ended as asked for."""
        return self.error is None and (self.finish_reason, len(self.token_ids)) == ("length", num_tokens)


class RouterClient:
    """An asynchronous context manager."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model

    async def __aenter__(self) -> Self:
        self._http = open_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    def begin(
        self, prompt: Sequence[int], num_tokens: int, session: str | None = None
    ) -> "tuple[Turn, asyncio.Task[Turn]]":
        """Begins a greedy turn; await the task for its end."""
        turn = Turn(prompt=prompt, max_tokens=num_tokens)
        return turn, asyncio.create_task(self._stream(turn, session))

    async def run(self, prompt: Sequence[int], num_tokens: int, session: str | None = None) -> Turn:
        return await self.begin(prompt, num_tokens, session)[1]

    async def _stream(self, turn: Turn, session: str | None) -> Turn:
        body = completion_body(self._model, list(turn.prompt), turn.max_tokens) | {"logprobs": 0}
        headers = {SESSION_HEADER: session} if session is not None else {}
        await stream_completion(self._http, self._url, body, turn, headers=headers)
        return turn

    async def status(self) -> dict[str, Any]:
        return await self.call("GET", f"{self._url}/admin/status")

    async def worker(self, worker_id: str) -> dict[str, Any]:
        """Returns what the router knows of one worker. Raises: WorkerError if it is not registered."""
        for each in (await self.status())["workers"]:
            if each["id"] == worker_id:
                return dict(each)
        raise WorkerError(f"the router has no worker {worker_id}")

    async def add(self, url: str) -> None:
        await self.call("POST", f"{self._url}/workers", {"url": url})
        worker_id = url.removeprefix("http://")
        await until_so(lambda: self._is_alive(worker_id), f"{worker_id} is alive")

    async def _is_alive(self, worker_id: str) -> bool:
        return bool((await self.worker(worker_id))["alive"])

    async def remove(self, worker_id: str) -> None:
        await self.call("DELETE", f"{self._url}/workers/{worker_id}")

    async def set_version_mode(self, mode: str) -> None:
        await self.call("PUT", f"{self._url}/admin/version", {"mode": mode})

    async def call(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Makes any JSON call, of the router or of an engine. Raises: WorkerError unless it answers 2xx."""
        async with self._http.request(method, url, json=body) as response:
            if not response.ok:
                raise WorkerError(f"{method} {url}: {response.status} {(await response.text())[:300]}")
            return dict(await response.json())


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits until the condition holds. Raises: WorkerError once PATIENCE_S have passed."""

    async def ask() -> bool:
        return condition()

    await until_so(ask, what)


async def until_so(condition: Callable[[], Any], what: str, at_most_s: float = PATIENCE_S) -> None:
    """Waits like `until` for a condition that has to be awaited."""
    deadline = time.monotonic() + at_most_s
    while not await condition():
        if time.monotonic() > deadline:
            raise WorkerError(f"not within {at_most_s:.0f} s: {what}")
        await asyncio.sleep(POLL_S)


def random_prompt(name: str, num_tokens: int) -> list[int]:
    """Returns token ids that both of the demo's models know, the same for the same name."""
    rng = random.Random(name)
    return [rng.randrange(ROLLOUT_SPEC.vocab_size) for _ in range(num_tokens)]
