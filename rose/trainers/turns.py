"""One turn of token ids, for trainers that bring no HTTP client of their own.

An answer has the exact ids and the logprobs of the sampled tokens. A trajectory's turns carry its name, so
that the router finds its prefix cache. A refused turn is not tried again: the router has tried every worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rose.errors import WorkerError
from rose.http import JOB_HEADER, RUN_HEADER

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A worker's answer; logprobs[i] belongs to token_ids[i]."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: tuple[int, ...]
    """The weight versions that made the tokens, in order; empty if no trainer publishes."""


class RouterTurns:
    """Turns on a router, for one event loop.

    ``key`` is the router's, if it wants one. ``job`` names the RL job, and ``run`` the training run whose
    weights it wants, if the router has several.
    """

    def __init__(
        self,
        router_url: str,
        model: str,
        key: str | None = None,
        job: str | None = None,
        run: str | None = None,
    ) -> None:
        self._url = router_url.rstrip("/") + "/v1/completions"
        self._model = model
        # No timeout for the turn itself: the router has deadlines of its own.
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        bearer = f"Bearer {key}" if key is not None else None
        named = {"Authorization": bearer, JOB_HEADER: job, RUN_HEADER: run}
        headers = {name: value for name, value in named.items() if value is not None}
        self._http = httpx.AsyncClient(
            headers=headers, timeout=timeout, trust_env=False, limits=httpx.Limits(max_connections=None)
        )

    async def complete(self, session: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> Turn:
        """Runs one turn; ``sampling`` has the fields of vLLM's SamplingParams. Raises: WorkerError."""
        asked = {"return_token_ids": True, "logprobs": 0, **sampling}
        body = {**asked, "model": self._model, "prompt": list(prompt_ids)}
        try:
            answer = await self._http.post(self._url, json=body, headers={"X-Session-ID": session})
        except httpx.HTTPError as error:
            raise WorkerError(f"{self._url}: turn of {session} failed: {error!r}") from error
        if not answer.is_success:
            reason = answer.text[:300]
            raise WorkerError(f"{self._url}: turn of {session}: HTTP {answer.status_code}: {reason}")
        return _turn(answer.json()["choices"][0])

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()


def _turn(choice: Mapping[str, Any]) -> Turn:
    found = (span["weight_version"] for span in choice["rose"]["spans"])
    versions = tuple(int(version.rpartition("/")[2]) for version in found if version is not None)
    return Turn(
        token_ids=choice["token_ids"],
        logprobs=choice["logprobs"]["token_logprobs"],
        finish_reason=choice["finish_reason"],
        versions=versions,
    )
