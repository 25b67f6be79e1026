"""One turn of token ids, for trainers that bring no HTTP client of their own.

An answer has the exact ids and the logprobs of the sampled tokens. A trajectory's turns carry its name, so
that the router finds its prefix cache. Of several routers, the name decides at which one turns begin. A turn
whose router dies or shuts down goes on at the next one, after the tokens that have arrived. A refused turn is
not tried again: the router has tried every worker.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import httpx
import msgspec

from rose.config import Settings
from rose.errors import WorkerError
from rose.http import JOB_HEADER, RETRY_S, RUN_HEADER, SO_FAR, WATCHED, Failures
from rose.scheduler.rollout.formats.resume import has_state, must_restart
from rose.scheduler.rollout.formats.routed import Rows, decoded
from rose.tls import client_context
from rose.trainers.router import routers_of

_PATH = "/inference/v1/generate"
_CONNECT_TIMEOUT_S = 10.0
_UNAVAILABLE = 503
_DATA = b"data: "
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAnswer:
    """A worker's answer; logprobs[i] belongs to token_ids[i]."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: tuple[int, ...]
    """The weight versions that made the tokens, in order; empty if no trainer publishes."""
    routed_experts: Rows | None = None
    """For each token of prompt and answer but the last, the experts of each layer that processed it; None
    from engines without --enable-return-routed-experts."""


class _Unanswered(WorkerError):
    """A router that did not answer to the end; another one may."""

    def __init__(self, message: str, retry_after: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0


@dataclass(slots=True)
class _Answer:
    """What has arrived of a turn, from whatever routers."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    routed_experts: str | None = None

    def take(self, choice: Mapping[str, Any]) -> None:
        """Takes a streamed part, or the whole answer."""
        self.token_ids += choice["token_ids"]
        if (logprobs := choice.get("logprobs")) is not None:
            self.logprobs += [each["logprob"] for each in logprobs["content"]]
        news = choice.get("rose", {})
        is_part = "spans" not in news
        if is_part and (version := news.get("weight_version")) is not None:
            self.versions.append(version)
        finish = choice.get("finish_reason")
        self.finish_reason = finish if finish is not None else news.get("finish_reason")
        self.routed_experts = choice.get("routed_experts")  # with the last event

    def take_whole(self, choice: Mapping[str, Any]) -> None:
        self.take(choice)
        found = (span["weight_version"] for span in choice["rose"]["spans"])
        self.versions += [version for version in found if version is not None]

    def turn(self, finish_reason: str) -> TurnAnswer:
        versions = tuple(int(version.rpartition("/")[2]) for version in self.versions)
        return TurnAnswer(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=finish_reason,
            versions=versions,
            routed_experts=decoded(self.routed_experts),
        )


class RouterTurns:
    """Turns on a router, or on several before the same workers, for one event loop.

    ``router_url`` is the router's address, or several that are separated by commas. ``key`` is the router's,
    if it wants one. By default both are those that the job scheduler has set (``ROSE_ROUTER_URL``,
    ``ROSE_ROUTER_API_KEY``). Without ``model`` the key's job decides, or else all workers serve the same one.
    At an https address the router must show a certificate of ``ROSE_TLS_CA``. ``job`` names the RL job, and
    ``run`` the training run whose weights it wants, if the router has several. ``retry_s``: for this many
    seconds from the first failure a turn is tried again while no router answers. Raises: ConfigError if no
    address is known.
    """

    def __init__(
        self,
        router_url: str | None = None,
        model: str | None = None,
        key: str | None = None,
        job: str | None = None,
        run: str | None = None,
        retry_s: float = RETRY_S,
    ) -> None:
        settings = Settings.from_environment()
        self._urls = routers_of(router_url, settings)
        key = key if key is not None else settings.router_api_key
        self._model = model
        self._retry_s = float(retry_s)
        # No timeout for a turn: the router has deadlines of its own, and the kernel watches its host.
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        bearer = f"Bearer {key}" if key is not None else None
        named = {"Authorization": bearer, JOB_HEADER: job, RUN_HEADER: run}
        headers = {name: value for name, value in named.items() if value is not None}
        transport = httpx.AsyncHTTPTransport(
            verify=client_context(settings.tls_ca),
            limits=httpx.Limits(max_connections=None),
            socket_options=WATCHED,
            trust_env=False,
        )
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout, transport=transport, trust_env=False)

    async def complete(
        self, session: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any]
    ) -> TurnAnswer:
        """Runs one turn; ``sampling`` has the fields of vLLM's SamplingParams. Raises: WorkerError."""
        body = {
            **({"model": self._model} if self._model is not None else {}),
            "token_ids": list(prompt_ids),
            "sampling_params": {"logprobs": 0, **sampling, "detokenize": False},
            # What starts again after a cut is better asked for whole: then it may.
            "stream": not _begins_anew(sampling),
        }
        headers = {"X-Session-ID": session, "Idempotency-Key": uuid.uuid4().hex}
        answer, at = _Answer(), crc32(session.encode())
        failures = Failures(self._retry_s, len(self._urls))
        while answer.finish_reason is None:
            url = self._urls[at % len(self._urls)] + _PATH
            try:
                await self._ask(url, body, headers, answer)
            except _Unanswered as error:
                if failures.are_too_many(len(answer.token_ids)):
                    raise WorkerError(f"{url}: turn of {session} failed: {error}") from error
                await asyncio.sleep(failures.pause_s(error.retry_after_s))
                at += 1
            except WorkerError as error:
                raise WorkerError(f"{url}: turn of {session}: {error}") from error
        return answer.turn(answer.finish_reason)

    async def _ask(
        self, url: str, body: Mapping[str, Any], headers: Mapping[str, str], answer: _Answer
    ) -> None:
        """Adds to the answer. Raises: _Unanswered if the router is not there to the end; WorkerError."""
        asked = {**body, SO_FAR: answer.token_ids} if answer.token_ids else body
        try:
            async with self._http.stream("POST", url, json=asked, headers=headers) as response:
                if response.status_code != 200:
                    reason = (await response.aread()).decode(errors="replace")[:300]
                    problem = f"HTTP {response.status_code}: {reason}"
                    if response.status_code == _UNAVAILABLE:
                        raise _Unanswered(problem, response.headers.get("Retry-After", ""))
                    raise WorkerError(problem)
                if not body["stream"]:
                    answer.take_whole(msgspec.json.decode(await response.aread())["choices"][0])
                    return
                async for line in _lines(response):
                    if line.startswith(_DATA) and not line.endswith(_DONE):
                        _take_event(msgspec.json.decode(line[len(_DATA) :]), answer)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            if answer.finish_reason is None:
                raise _Unanswered(repr(error)) from error
        if answer.finish_reason is None:
            raise _Unanswered("the stream broke off")

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()


def _begins_anew(sampling: Mapping[str, Any]) -> bool:
    """Whether a cut turn may not go on after its tokens; stock workers can't with a grammar or penalties."""
    completion = {**sampling, "vllm_xargs": sampling.get("extra_args")}
    return must_restart(completion) or has_state(completion)


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yields the whole lines. httpx's own end at U+2028, too, which a text within JSON may hold."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def _take_event(event: Mapping[str, Any], answer: _Answer) -> None:
    """Raises: WorkerError if it is an error."""
    if (error := event.get("error")) is not None:
        kind = _Unanswered if error.get("code") == _UNAVAILABLE else WorkerError
        raise kind(f"HTTP {error.get('code')}: {error.get('message')}")
    for choice in event["choices"]:
        answer.take(choice)
