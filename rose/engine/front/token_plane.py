"""The engine core of a front: requests leave as token-level turns for the router, their tokens come back.

Owns the turns in flight. Promises that each request ends once, with its last token, with an error that has
the router's status and message, or because its client left, which ends the turn on its worker, too. Lives on
the API server's event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
from vllm.exceptions import GracefulHTTPError, VLLMError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor

from rose.engine.front.caller import caller_headers
from rose.engine.front.calls import (
    Outputs,
    begins_anew,
    call_body,
    error_of,
    streams_single_tokens,
    wants_stream,
)
from rose.errors import RoseError
from rose.http import FRONT_SECRET_HEADER, RETRY_S, SO_FAR, WATCHED, Failures
from rose.tls import client_context

logger = logging.getLogger(__name__)

_PATH = "/inference/v1/generate"
_MODELS_PATH = "/v1/models"
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
"""The router itself watches every turn, and the kernel its host."""
_ASK_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
_DATA = b"data: "
_DONE = b"[DONE]"
_PAUSE_S = 0.001
"""The first wait for a token to be taken; the next ones are longer."""
_LONGEST_PAUSE_S = 0.1
_PATIENCE_S = 5.0
"""How long a request's tokens wait for a client that takes them slowly. Its deltas are merged then."""
_EARNED_S = 0.02
"""The patience that comes back with each token that was taken. A long answer to a client that keeps up would
otherwise use up all patience in waits of a millisecond."""


class _RouterLost(RoseError):
    """A router did not answer to the end; another one may go on, or the same once it has started again."""

    def __init__(self, status: int, message: str, *, is_there: bool = False) -> None:
        """`is_there`: the router itself has refused."""
        super().__init__(message)
        self.status = status
        self.is_there = is_there


class TokenPlane(EngineCoreClient):
    """Stands where vLLM's AsyncLLM has the client of its engine core."""

    def __init__(
        self, router_urls: Sequence[str], model: str, secret: str | None, ca: Path | None = None
    ) -> None:
        """`router_urls`: routers before the same workers. A turn goes on at the next one if its router dies,
        and waits for one while none is there.
        `secret`: by which a router that started this front knows its turns. `ca`: the certificates that
        routers must show one of; None: the system's."""
        self._router_urls = router_urls
        self._at = 0
        """The router that is asked first: the one that answered last."""
        self._model = model
        self._trusts = client_context(ca)
        self._own_headers = {"Content-Type": "application/json"}
        if secret is not None:
            self._own_headers[FRONT_SECRET_HEADER] = secret
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self.processor: OutputProcessor | None = None
        """Where errors are put: engine cores have no way to send them."""
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._unread: set[str] = set()
        """The requests that have outputs in that queue."""
        self._turns: dict[str, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # What AsyncLLM calls ----------------------------------------------------------------------------------

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        turn = asyncio.create_task(self._run(request, caller_headers()))
        self._turns[request.request_id] = turn
        turn.add_done_callback(lambda _: self._turns.pop(request.request_id, None))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (turn := self._turns.get(request_id)) is not None:
                turn.cancel()

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await self._outputs.get()
        self._unread.difference_update(output.request_id for output in outputs.outputs)
        return outputs

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Does nothing: the workers have the adapters."""
        return True

    async def reset_mm_cache_async(self) -> None:
        """Does nothing: a front takes text alone."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends all turns. May be called in any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        for turn in self._turns.values():
            turn.cancel()
        if self._session is not None:
            await self._session.close()

    async def model_cards(self) -> list[dict[str, Any]]:
        """Returns the cards of the models and adapters behind the router, which the request's client may ask
        for: those of the first router that answers. Raises: GracefulHTTPError."""
        headers, lost = {**caller_headers(), **self._own_headers}, _http_error(503, "there is no router")
        first, count = self._at, len(self._router_urls)
        for at in ((first + step) % count for step in range(count)):
            url = self._router_urls[at]
            try:
                async with self._http().get(
                    url + _MODELS_PATH, headers=headers, timeout=_ASK_TIMEOUT
                ) as response:
                    if response.status == 200:
                        return list((await response.json())["data"])
                    lost = _http_error(response.status, _message(await response.text()))
                    if response.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                        raise lost
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
                lost = _http_error(503, f"the router at {url} does not answer ({type(error).__name__})")
                lost.__cause__ = error
            self._pass_over(at)
        raise lost

    # A turn -----------------------------------------------------------------------------------------------

    async def _run(self, request: EngineCoreRequest, headers: Mapping[str, str]) -> None:
        patience_s = _PATIENCE_S if streams_single_tokens(request.sampling_params) else 0.0
        try:
            async for output in self._answer(request, headers):
                if patience_s > 0:
                    patience_s -= await self._waited_s(request.request_id, patience_s)
                    patience_s = min(patience_s + _EARNED_S, _PATIENCE_S) if patience_s > 0 else 0.0
                self._unread.add(request.request_id)
                self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))
        except VLLMError as error:
            self._fail(request.request_id, error)
        except Exception:
            logger.exception("turn failed request=%s", request.request_id)
            self._fail(request.request_id, _http_error(500, "the front failed; its log holds the reason"))

    async def _waited_s(self, request_id: str, most_s: float) -> float:
        """Waits until a request's handler has taken all outputs, and returns how long that was. Ends once
        ``most_s`` are over; a stall of the event loop does not count."""
        waited_s, pause_s = 0.0, _PAUSE_S
        while waited_s < most_s and self._is_behind(request_id):
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return waited_s

    def _is_behind(self, request_id: str) -> bool:
        """Whether vLLM would merge a request's next output with one that its handler has not taken yet. The
        answers of a chat (n above 1) share a queue, and are told apart there."""
        assert self.processor is not None
        if request_id in self._unread:
            return True
        state = self.processor.request_states.get(request_id)
        waiting = state.queue.output if state is not None and state.queue is not None else None
        return isinstance(waiting, RequestOutput) and any(
            answer.index == state.request_index for answer in waiting.outputs
        )

    async def _answer(
        self, request: EngineCoreRequest, headers: Mapping[str, str]
    ) -> AsyncIterator[EngineCoreOutput]:
        body, outputs = call_body(request, self._model), Outputs(request)
        is_streamed = wants_stream(request.sampling_params)
        failures = Failures(RETRY_S, len(self._router_urls))
        while True:
            at = self._at
            try:
                async for output in self._part(self._router_urls[at], body, headers, outputs, is_streamed):
                    yield output
                return
            except _RouterLost as error:
                if outputs.is_finished:
                    return
                are_too_many = failures.are_too_many(len(outputs.so_far))
                are_refusals = error.is_there and failures.have_all_failed
                if are_too_many or are_refusals or (outputs.so_far and begins_anew(body)):
                    raise _http_error(error.status, str(error)) from error
                logger.warning("turn is sent again request=%s reason=%s", request.request_id, error)
            self._pass_over(at)
            outputs.drop_held()
            await asyncio.sleep(failures.pause_s(0.0))
            if outputs.so_far:
                body[SO_FAR] = outputs.so_far

    def _pass_over(self, at: int) -> None:
        """Asks the next router first, unless that was noticed already."""
        if self._at == at:
            self._at = (at + 1) % len(self._router_urls)

    async def _part(
        self, url: str, body: dict[str, Any], headers: Mapping[str, str], outputs: Outputs, is_streamed: bool
    ) -> AsyncIterator[EngineCoreOutput]:
        """Yields what one router answers. Raises: _RouterLost; GracefulHTTPError."""
        async with self._posted(url, body, headers) as response:
            if not is_streamed:
                for output in outputs.take(msgspec.json.decode(await response.read())):
                    yield output
                return
            async with aclosing(_lines(response.content)) as lines:
                async for line in lines:
                    if not line.startswith(_DATA) or line.startswith(_DONE, len(_DATA)):
                        continue
                    event = msgspec.json.decode(line[len(_DATA) :])
                    if (error := error_of(event)) is not None:
                        raise _http_error(*error)
                    for output in outputs.take(event):
                        yield output
            if not outputs.is_finished:
                raise _RouterLost(502, f"the stream of the router at {url} broke off; send it again")

    @asynccontextmanager
    async def _posted(
        self, url: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a call. Raises: GracefulHTTPError for an answer other than 200; _RouterLost for none."""
        all_headers = {**headers, **self._own_headers}
        try:
            async with self._http().post(
                url + _PATH, data=msgspec.json.encode(body), headers=all_headers, timeout=_TIMEOUT
            ) as response:
                if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    raise _RouterLost(503, _message(await response.text()), is_there=True)
                if response.status != 200:
                    raise _http_error(response.status, _message(await response.text()))
                yield response
        except aiohttp.ClientError as error:
            reason = f"{type(error).__name__}: {error}"
            raise _RouterLost(503, f"the router at {url} does not answer ({reason})") from error

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._loop = asyncio.get_running_loop()
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, socket_factory=_watched, ssl=self._trusts),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _fail(self, request_id: str, error: Exception) -> None:
        """Gives a request's handler an error, and ends the siblings of the same chat (n above 1)."""
        assert self.processor is not None
        state = self.processor.request_states.get(request_id)
        if state is None:
            return  # its client has left
        state.queue.put(error)
        parent = state.parent_req
        whole = parent.request_id if parent is not None else request_id
        for sibling in self.processor.abort_requests([whole], internal=True):
            if sibling != request_id and (turn := self._turns.get(sibling)) is not None:
                turn.cancel()


def _watched(address: aiohttp.AddrInfoType) -> socket.socket:
    """Makes a socket that notices the death of the router's host."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    for option in WATCHED:
        made.setsockopt(*option)
    return made


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yields the whole lines. They are read as they come: when a connection breaks, aiohttp drops what nobody
    has read. Raises: aiohttp.ClientError, after the last line."""
    lines: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    async def read() -> None:
        rest = b""
        try:
            async for part in content.iter_any():
                *whole, rest = (rest + part).split(b"\n")
                for line in whole:
                    lines.put_nowait(line)
            lines.put_nowait(None)
        except Exception as error:
            lines.put_nowait(error)

    reading = asyncio.create_task(read())
    try:
        while (line := await lines.get()) is not None:
            if isinstance(line, Exception):
                raise line
            yield line
    finally:
        reading.cancel()


def _http_error(status: int, message: str) -> GracefulHTTPError:
    known = status in HTTPStatus._value2member_map_ and status >= 400
    return GracefulHTTPError(message, HTTPStatus(status if known else 502))


def _message(text: str) -> str:
    """Returns the message of an error in OpenAI's shape, or the whole text."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
