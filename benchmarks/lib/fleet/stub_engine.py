"""A stand-in for a rollout engine that costs little, with the leases of a real one (rose/engine/http/leases).

Owns: one listening socket; streamed completions whose tokens follow from all tokens before them. Promises: a
continuation from prompt and generated tokens gives exactly the rest of the unsplit run. GET /peak has the
turns and the most that ran at a time, counted apart from the leases; GET /turns the first token of each
turn's prompt, its begin and its end. Never: computes anything else.

    python benchmarks/lib/fleet/stub_engine.py --chunk-tokens 8 --chunk-ms 200
prints its URL.
"""

import argparse
import asyncio
import sys
import time

import msgspec
import uvloop
from aiohttp import web

from rose.engine.http.leases import Ask, Leases, begun
from rose.http import LEASE_HEADER, NO_LEASE

MODEL = "stub"
VOCABULARY = 997


def tokens_after(tokens: list[int], count: int) -> list[int]:
    """Returns the next tokens of this stand-in's model."""
    total, length, made = sum(tokens), len(tokens), []
    for _ in range(count):
        made.append((31 * total + 7 * length + 1) % VOCABULARY)
        total, length = total + made[-1], length + 1
    return made


class StubEngine:
    def __init__(self, chunk_tokens: int, chunk_s: float) -> None:
        self._chunk_tokens = chunk_tokens
        self._chunk_s = chunk_s
        self._leases = Leases()
        self._running = self._peak = self._refused = 0
        self._turns: list[tuple[int, float, float]] = []

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/rose/v1/status", self._status)
        app.router.add_get("/peak", self._show_peak)
        app.router.add_get("/turns", self._show_turns)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _status(self, request: web.Request) -> web.Response:
        asked = request.query
        ask = Ask(
            asked["follower"],
            float(asked["every_s"]),
            int(asked["cap"]),
            wants=int(asked["wants"]),
            lends=asked.get("lends"),
            priority=int(asked.get("priority", 0)),
            needs=asked.get("needs") == "1",
            gone=asked.get("gone"),
        )
        lease = self._leases.asked(ask, time.monotonic())
        return web.json_response({"num_running": self._running, "lease": lease.model_dump()})

    async def _show_peak(self, _request: web.Request) -> web.Response:
        return web.json_response({"peak": self._peak, "turns": len(self._turns), "refused": self._refused})

    async def _show_turns(self, _request: web.Request) -> web.Response:
        return web.json_response(self._turns)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        name, _, fence = request.headers[LEASE_HEADER].rpartition(" ")
        if (refusal := await begun(self._leases, name, int(fence))) is not None:
            self._refused += 1
            return web.json_response({"error": {"message": refusal, "type": NO_LEASE}}, status=503)
        self._running += 1
        self._peak = max(self._peak, self._running)
        body, began = msgspec.json.decode(await request.read()), time.monotonic()
        try:
            return await self._stream(request, body)
        finally:
            self._running -= 1
            self._leases.end(name)
            self._turns.append((body["prompt"][0], began, time.monotonic()))

    async def _stream(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        prompt, left = body["prompt"], body["max_tokens"]
        assert isinstance(prompt, list) and isinstance(left, int)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        made = tokens_after(prompt, left)
        for start in range(0, left, self._chunk_tokens):
            await asyncio.sleep(self._chunk_s)
            chunk = made[start : start + self._chunk_tokens]
            finish = "length" if start + len(chunk) == left else None
            choice = {"index": 0, "text": "", "token_ids": chunk, "finish_reason": finish}
            await response.write(b"data: %b\n\n" % msgspec.json.encode({"model": MODEL, "choices": [choice]}))
        await response.write(b"data: [DONE]\n\n")
        return response


async def serve(engine: StubEngine) -> None:
    """Serves on any free port until killed."""
    runner = web.AppRunner(engine.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunk-tokens", type=int, required=True)
    parser.add_argument("--chunk-ms", type=float, required=True)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(StubEngine(args.chunk_tokens, args.chunk_ms / 1000)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
