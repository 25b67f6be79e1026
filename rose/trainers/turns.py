"""One turn of token ids, for trainers that bring no HTTP client of their own.

Owns: the request and what is read from its answer. Promises: exact ids and the sampled tokens' logprobs; a
trajectory's turns carry its name, so that the router finds its prefix cache. Never: tries again what the
router refused: it has tried every worker already.
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
    """What a worker said; logprobs[i] belongs to token_ids[i]."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: tuple[int, ...]
    """Of the weights that made the tokens, in their order; empty where no trainer publishes."""


class RouterTurns:
    """Turns on a router, for one event loop.

    ``key``: the router's own, where it asks for one; ``job``, ``run``: the RL job's name, and the training
    run whose weights it wants, where the router has several.
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
        # As long as the turn takes: the router has deadlines of its own.
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        bearer = f"Bearer {key}" if key is not None else None
        named = {"Authorization": bearer, JOB_HEADER: job, RUN_HEADER: run}
        headers = {name: value for name, value in named.items() if value is not None}
        self._http = httpx.AsyncClient(
            headers=headers, timeout=timeout, trust_env=False, limits=httpx.Limits(max_connections=None)
        )

    async def complete(self, session: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> Turn:
        """``sampling``: as in vLLM's SamplingParams. Raises: WorkerError."""
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
