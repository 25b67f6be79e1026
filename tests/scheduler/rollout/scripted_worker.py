"""A stand-in for a vLLM server, for faults that a real engine can't produce on demand.

It speaks the /v1/completions event stream of vLLM with ROSE's endpoint. Its "model" is a function of all
tokens so far: a continuation from prompt + generated tokens gives exactly the rest of the unsplit run, and
any lost or doubled token shows.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rose.engine.http.leases import Ask, Leases, begun
from rose.http import LEASE_HEADER, NO_LEASE, NO_PROMPT_IDS_HEADER
from tests.scheduler.rollout.expert_rows import experts_of

VOCABULARY = 997
STOP_REASONS = {
    "abort_reclaimed": "rose_reclaimed",
    "abort_stall": "rose_stall",
    "abort_deactivated": "rose_deactivated",
    "abort_plain": None,
}


def next_token(tokens: list[int]) -> int:
    return (31 * sum(tokens) + 7 * len(tokens) + 1) % VOCABULARY


def expected_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def rendered(messages: list[dict[str, Any]]) -> list[int]:
    """What its chat template makes of messages."""
    return list("".join(message["content"] for message in messages).encode())


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one request, after so many tokens."""

    kind: str
    """abort_(reclaimed | stall | deactivated | plain), swallowed, hang, slow (a chat until told to finish),
    hold (until told to go on), disconnect, error, status"""
    after_tokens: int = 0
    status: int = 500


@dataclass
class ScriptedWorker:
    """`async with ScriptedWorker() as worker:` serves at `worker.url`. Each request uses up one fault."""

    faults: deque[Fault] = field(default_factory=deque)
    version: str | None = None
    adapters: list[str] | None = None
    """The newest versions of LoRA adapters, such as "run/7"; `models` has their names, such as "run@7"."""
    pressure: str = "normal"
    is_active: bool = True
    is_updating: bool = False
    continues_state: bool = False
    stops_after: int | None = None
    """The number of tokens after which an answer ends by itself."""
    has_rose_routes: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    models: list[str] = field(default_factory=lambda: ["scripted"])
    max_model_len: int | None = None
    serving_busy_s: float | None = None
    serving_kv_usage: float | None = None
    steps: list[int] = field(default_factory=list)
    trace_parents: list[str] = field(default_factory=list)
    num_cancelled: int = 0
    parses_chat: bool = False
    """Whether chats are answered as a reasoning parser would."""
    takes_chat_ids: bool = True
    tells_experts: bool = False
    unfinished: frozenset[int] = frozenset()
    """Tokens that are part of a character, which is finished by the next other one."""
    follows_loans: bool = False
    has_subscriber: bool = False
    run_problems: dict[str, str] = field(default_factory=dict)
    leases: Leases | None = None
    """What routers may have, as ROSE's engines divide it; None: everything."""
    hold_after: int | None = None
    """Every answer waits after so many tokens for let_pass()."""
    prefill_s: float = 0.0
    """How long every answer takes to its first token. Nothing of it is kept when the request is given up."""
    num_held: int = 0
    most_in_flight: int = 0
    url: str = ""
    _may_go_on: asyncio.Event = field(default_factory=asyncio.Event)
    _may_pass: asyncio.Event = field(default_factory=asyncio.Event)
    _num_leased: int = 0
    _slow_is_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> "ScriptedWorker":
        self.go_on()
        app = web.Application(client_max_size=2**26, middlewares=[self._leased])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/pause", self._health)
        if self.has_rose_routes:
            app.router.add_get("/rose/v1/status", self._status)
            app.router.add_post("/rose/v1/rl_step", self._rl_step)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._runner.cleanup()

    def hold(self) -> None:
        """Makes no token until told to go on."""
        self._may_go_on.clear()

    def go_on(self) -> None:
        self._may_go_on.set()

    def let_pass(self) -> None:
        """Ends the wait of `hold_after`, for good."""
        self._may_pass.set()

    def finish_slow(self) -> None:
        """Ends the wait of chats with the fault `slow`, during which other requests get their tokens."""
        self._slow_is_over.set()

    @property
    def id(self) -> str:
        return self.url.removeprefix("http://")

    @web.middleware
    async def _leased(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.leases is None or LEASE_HEADER not in request.headers:
            return await handler(request)
        name, fence = request.headers[LEASE_HEADER].split()
        if (refusal := await begun(self.leases, name, int(fence))) is not None:
            return web.json_response({"error": {"message": refusal, "type": NO_LEASE}}, status=503)
        self._num_leased += 1
        self.most_in_flight = max(self.most_in_flight, self._num_leased)
        try:
            return await handler(request)
        finally:
            self._num_leased -= 1
            self.leases.end(name)

    def _lease(self, asked: Mapping[str, str]) -> dict[str, Any]:
        if self.leases is None or "cap" not in asked:
            return {}
        ask = Ask(
            asked["follower"],
            float(asked["every_s"]),
            int(asked["cap"]),
            wants=int(asked["wants"]),
            lends=asked.get("lends"),
            priority=int(asked.get("priority", 0)),
            needs=asked.get("needs") == "1",
            gone=asked.get("gone"),
            run=asked.get("run"),
        )
        return {"lease": self.leases.asked(ask, time.monotonic()).model_dump()}

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _request: web.Request) -> web.Response:
        cards = [{"id": name, "max_model_len": self.max_model_len} for name in self.models]
        return web.json_response({"object": "list", "data": cards})

    async def _status(self, request: web.Request) -> web.Response:
        gate = {"mode": "slack", "admitted_steps": 1, "declined_steps": 0, "share": 1.0}
        status = {"weight_version": self.version, "pressure": self.pressure, "gate": gate}
        serving = {"serving_busy_s": self.serving_busy_s, "serving_kv_usage": self.serving_kv_usage}
        weights = {"is_active": self.is_active, "is_updating": self.is_updating}
        grammars = {"continues_state": self.continues_state, "adapters": self.adapters}
        self.has_subscriber = self.has_subscriber or self.follows_loans
        runs = {
            "follows_loans": self.follows_loans,
            "has_subscriber": self.has_subscriber,
            "run_problems": self.run_problems,
        }
        lease = self._lease(request.query)
        return web.json_response({**status, **serving, **weights, **grammars, **runs, **lease})

    async def _rl_step(self, request: web.Request) -> web.Response:
        self.steps.append((await request.json())["step"])
        return web.json_response({})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._check_model(body)
        return web.json_response({"tokens": list(body["prompt"].encode()), "model": self.models[0]})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._check_model(body)
        tokens = body["tokens"]
        return web.json_response({"prompt": "".join(map(self._text, tokens))})

    def _text(self, token: int) -> str:
        return "\N{REPLACEMENT CHARACTER}" if token in self.unfinished else f"<{token}>"

    async def _take(self, request: web.Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.requests.append(body)
        if (parent := request.headers.get("traceparent")) is not None:
            self.trace_parents.append(parent)
        self._check_model(body)
        return body

    def _check_model(self, body: dict[str, Any]) -> None:
        if body.get("model") is not None and (model := self._served(body)) not in self.models:
            error = {"message": f"The model `{model}` does not exist.", "code": 404}
            raise web.HTTPNotFound(text=json.dumps({"error": error}), content_type="application/json")

    def _served(self, body: dict[str, Any]) -> str:
        """The model that answers: the name of a run means its newest version."""
        newest = {each.rpartition("/")[0]: each.replace("/", "@") for each in self.adapters or ()}
        model = body.get("model")
        return newest.get(model, model) if model is not None else self.models[0]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._take(request)
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.kind == "status":
            return web.json_response({"error": {"message": "scripted"}}, status=fault.status)
        if fault is not None and fault.kind == "hang":
            try:
                await asyncio.sleep(3600)
            finally:
                self.num_cancelled += 1
        if fault is not None and fault.kind == "slow" and not body.get("stream"):
            await self._slow_is_over.wait()
        stop_reason = STOP_REASONS[fault.kind] if fault is not None and fault.kind in STOP_REASONS else None
        if body.get("return_token_ids") and body.get("stream"):
            return await self._stream(request, {**body, "prompt": self._rendered(body)}, fault)
        message = {"role": "assistant", "content": "hello"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "stop_reason": stop_reason}
        usage = {"completion_tokens": body.get("max_tokens", 1)}
        if not body.get("stream"):
            return web.json_response(
                {"model": body.get("model"), "choices": [choice], "prompt_token_ids": [1], "usage": usage}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await _send(response, {"model": body.get("model"), "choices": []})
        if fault is not None and fault.kind == "slow":
            await self._slow_is_over.wait()
        if fault is not None and request.transport is not None:
            request.transport.abort()
        else:
            last = json.dumps({"model": body.get("model"), "choices": [], "usage": usage}).encode()
            for piece in (b"data: " + last[:15], last[15:] + b"\n\n"):  # events come in any pieces
                await response.write(piece)
                await asyncio.sleep(0.01)
            await response.write(b"data: [DONE]\n\n")
        return response

    def _rendered(self, body: dict[str, Any]) -> list[int]:
        ids: list[int] | None = body.get("kv_transfer_params", {}).get("prompt_token_ids")
        return ids if ids is not None and self.takes_chat_ids else rendered(body["messages"])

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._take(request)
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.kind == "status":
            return web.json_response({"error": {"message": "scripted"}}, status=fault.status)
        if not body.get("stream"):
            return web.json_response({"choices": [], "whole": True})
        try:
            return await self._stream(request, body, fault)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def _stream(
        self, request: web.Request, body: dict[str, Any], fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        body = {**body, "model": self._served(body)}
        prompt = body["prompt"] if isinstance(body["prompt"], list) else list(body["prompt"].encode())
        tokens, total = list(prompt), body.get("max_tokens", 16)
        if "messages" in body:
            await _send(response, self._speaker(body))
        await asyncio.sleep(self.prefill_s)
        for position in range(total):
            is_due = fault is not None and position == fault.after_tokens
            if is_due and not await self._fail(request, response, fault, self._experts(body, tokens)):
                return response
            if position == self.hold_after:
                self.num_held += 1
                await self._may_pass.wait()
            await self._may_go_on.wait()
            tokens.append(next_token(tokens))
            finish = "length" if position == total - 1 else None
            if position + 1 == self.stops_after:
                finish = "stop"
            echo = prompt if NO_PROMPT_IDS_HEADER not in request.headers else None
            chunk = self._chunk(body, echo, tokens[-1], position, finish)
            chunk["choices"][0] |= self._experts(body, tokens) if finish is not None else {}
            await _send(response, chunk)
            if finish == "stop":
                break
        if fault is not None and fault.after_tokens == self.stops_after:
            await self._fail(request, response, fault, self._experts(body, tokens))
            return response
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 1}}
        await _send(response, {"choices": [], "usage": usage, "model": body["model"]})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _speaker(self, body: dict[str, Any]) -> dict[str, Any]:
        """The first event of a chat."""
        prompt: list[int] = body["prompt"]
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        usage: dict[str, Any] = {"prompt_tokens": len(prompt)}
        if self.parses_chat:
            usage["completion_tokens_details"] = {"reasoning_tokens": 0}
        return {"model": body["model"], "choices": [choice], "prompt_token_ids": prompt, "usage": usage}

    def _chunk(
        self, body: dict[str, Any], echo: list[int] | None, token: int, position: int, finish: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": "" if token in self.unfinished else f"<{token}>",
            "token_ids": [token],
            "finish_reason": finish,
            "stop_reason": None,
        }
        if "messages" in body:
            choice["delta"] = {"content": choice.pop("text")}
            if body.get("logprobs"):
                choice["logprobs"] = {"content": [{"token": f"<{token}>", "logprob": -token / 1000}]}
            return {"model": body["model"], "choices": [choice]}
        if position == 0:
            choice["prompt_token_ids"] = echo
        if body.get("logprobs") is not None:
            name = f"token_id:{token}"
            choice["logprobs"] = {
                "tokens": [name],
                "token_logprobs": [-token / 1000],
                "top_logprobs": [{name: -token / 1000}],
                "text_offset": [0],
            }
        return {"id": "cmpl-x", "object": "text_completion", "model": body["model"], "choices": [choice]}

    def _experts(self, body: dict[str, Any], tokens: list[int]) -> dict[str, str]:
        first = body.get("routed_experts_prompt_start", 0)
        return {"routed_experts": experts_of(tokens, first)} if self.tells_experts else {}

    async def _fail(
        self, request: web.Request, response: web.StreamResponse, fault: Fault | None, last: dict[str, str]
    ) -> bool:
        """True: carry on with the stream."""
        assert fault is not None
        if fault.kind == "hang":
            await asyncio.sleep(3600)
        if fault.kind == "hold":
            self.hold()
            return True
        if fault.kind == "disconnect":
            assert request.transport is not None
            request.transport.abort()
            return False
        if fault.kind == "error":
            error = {"message": "engine died", "type": "InternalServerError", "code": 500}
            await _send(response, {"error": error})
        elif fault.kind != "swallowed":
            choice: dict[str, Any] = {"index": 0, "token_ids": [], "finish_reason": "abort"}
            choice |= {"text": "", "delta": {"content": ""}}
            choice["stop_reason"] = STOP_REASONS[fault.kind]
            await _send(response, {"model": self.models[0], "choices": [choice | last]})
        await response.write(b"data: [DONE]\n\n")
        return False


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
