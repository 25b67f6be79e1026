"""A stand-in for a vLLM server that costs next to nothing, for benchmarks of what stands before it.

Owns: one listening socket, answers of fixed length. Promises: the events that vLLM 0.32 streams for
/v1/completions, prompt ids echoed where asked, unless the router asks ROSE's endpoint to be spared them; with
--stock as from a vLLM without that endpoint. With --has-status it answers as many workers' heartbeats as
there are addresses of loopback. SGLang's /generate in one piece, and chats too, as late as a
stream's last event. Never: computes anything.

    python benchmarks/lib/router/stub_worker.py --num-chunks 4 --chunk-tokens 16 --delay-ms 0
prints its URL.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass

import uvloop

from rose.http import NO_PROMPT_IDS_HEADER

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n"
_STREAM = _HEAD % b"text/event-stream; charset=utf-8" + b"Transfer-Encoding: chunked\r\n\r\n"
_NO_PROMPT_IDS = NO_PROMPT_IDS_HEADER.encode()
_QUESTIONS = (b"/health", b"/health_generate", b"/get_model_info", b"/server_info", b"/get_server_info")
"""What routers ask of a worker before they take it."""
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedAnswer:
    """How long an answer is and how fast it comes."""

    num_chunks: int
    chunk_tokens: int
    delay_s: float
    is_stock: bool
    """Without ROSE's endpoint."""
    has_status: bool
    """With ROSE's answer to heartbeats."""


class StubProtocol(asyncio.Protocol):
    """One connection; requests one after the other."""

    num_statuses = 0
    """The answers to heartbeats on all connections."""

    def __init__(self, answer: ScriptedAnswer) -> None:
        self._answer = answer
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment] # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end])
            length = _content_length(head)
            if len(self._buffer) < end + 4 + length:
                return
            body = bytes(self._buffer[end + 4 : end + 4 + length])
            del self._buffer[: end + 4 + length]
            is_spared = _NO_PROMPT_IDS in head and not self._answer.is_stock
            self._reply(head.split(b" ", 2)[1], body, echoes=not is_spared)

    def _reply(self, path: bytes, body: bytes, *, echoes: bool) -> None:
        assert self._transport is not None
        if path.startswith(b"/rose/v1/status?") and self._answer.has_status:
            StubProtocol.num_statuses += 1
            self._write_json(_status(path))
        elif path == b"/num_statuses":
            self._write_json({"num_statuses": StubProtocol.num_statuses})
        elif path == b"/v1/completions":
            is_stream = b'"stream":true' in body[-4096:] or b'"stream":true' in body[:4096]
            if is_stream:
                self._stream(body, echoes)
            else:
                self._write_json(_completion(self._answer))
        elif path == b"/v1/chat/completions":
            late_s = self._answer.num_chunks * self._answer.delay_s
            asyncio.get_running_loop().call_later(late_s, self._write_json, _chat(self._answer))
        elif path == b"/generate":
            self._write_json(_generated(self._answer))
        elif path == b"/v1/models":
            card = {"id": "stub", "object": "model", "max_model_len": 131072}
            self._write_json({"object": "list", "data": [card]})
        elif path in (
            b"/health",
            b"/health_generate",
            b"/get_model_info",
            b"/server_info",
            b"/get_server_info",
        ):
            self._write_json({"model_path": "stub", "is_generation": True})
        else:
            self._transport.write(_NOT_FOUND)

    def _write_json(self, value: object) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return  # the router gave up
        data = json.dumps(value).encode()
        length = b"Content-Length: %d\r\n\r\n" % len(data)
        self._transport.write(_HEAD % b"application/json" + length + data)

    def _stream(self, body: bytes, echoes: bool) -> None:
        assert self._transport is not None
        echoed = b""
        if echoes and b'"return_token_ids":true' in body:
            start = body.find(b'"prompt":[') + 9
            if start >= 9:
                echoed = b',"prompt_token_ids":' + body[start : body.index(b"]", start) + 1]
        self._transport.write(_STREAM)
        self._send_chunk(0, echoed)

    def _send_chunk(self, index: int, echoed: bytes) -> None:
        """Send what is due; the rest after the delay, or at once."""
        transport, answer = self._transport, self._answer
        assert transport is not None
        if transport.is_closing():
            return  # the router gave up
        while index < answer.num_chunks:
            transport.write(_sse(_event(answer, index, echoed)))
            index, echoed = index + 1, b""
            if answer.delay_s:
                asyncio.get_running_loop().call_later(answer.delay_s, self._send_chunk, index, echoed)
                return
        usage = b'{"model":"stub","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
        transport.write(_sse(usage) + _sse(b"[DONE]") + b"0\r\n\r\n")


def _status(path: bytes) -> dict[str, object]:
    """What the router needs of an idle engine's status; it may have all of the engine's turns."""
    asked = dict(pair.partition("=")[::2] for pair in path.decode().partition("?")[2].split("&"))
    gate = {"mode": "slack", "admitted_steps": 1, "declined_steps": 0, "share": 1.0}
    lease = {"router": asked["follower"], "turns": int(asked["cap"]), "others": 0, "fence": 1}
    counts = {"steps": 1, "num_running": 0, "num_waiting": 0, "stalled_requests": 0, "generated_tokens": 9}
    weights = {"model": "stub", "weight_version": "run/1", "is_active": True, "is_updating": False}
    return {"pressure": "normal", "gate": gate, "lease": lease, **counts, **weights}


def _chat(answer: ScriptedAnswer) -> dict[str, object]:
    usage = {"prompt_tokens": 1, "completion_tokens": answer.num_chunks * answer.chunk_tokens}
    choice = {"index": 0, "message": {"role": "assistant", "content": "word"}, "finish_reason": "stop"}
    return {"id": "chatcmpl-stub", "model": "stub", "choices": [choice], "usage": usage}


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _sse(payload: bytes) -> bytes:
    data = b"data: %b\n\n" % payload
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(answer: ScriptedAnswer, index: int, echoed: bytes) -> bytes:
    ids = ",".join(str(1000 + index + i) for i in range(answer.chunk_tokens)).encode()
    finish = b'"length"' if index == answer.num_chunks - 1 else b"null"
    text = b"word " * answer.chunk_tokens
    return (
        b'{"id":"cmpl-stub","object":"text_completion","created":1,"model":"stub","choices":[{"index":0,'
        b'"text":"%b","logprobs":null,"finish_reason":%b,"stop_reason":null,"token_ids":[%b]%b}],"usage":null}'
        % (text, finish, ids, echoed)
    )


def _completion(answer: ScriptedAnswer) -> object:
    text = "word " * answer.chunk_tokens * answer.num_chunks
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": "cmpl-stub",
        "object": "text_completion",
        "model": "stub",
        "choices": [choice],
        "usage": usage,
    }


def _generated(answer: ScriptedAnswer) -> object:
    num_tokens = answer.chunk_tokens * answer.num_chunks
    meta = {"id": "stub", "finish_reason": {"type": "length"}, "completion_tokens": num_tokens}
    return {"text": "word " * num_tokens, "output_ids": list(range(num_tokens)), "meta_info": meta}


async def serve(answer: ScriptedAnswer) -> None:
    """Serve on any free port until killed."""
    loop = asyncio.get_running_loop()
    host = "0.0.0.0" if answer.has_status else "127.0.0.1"
    server = await loop.create_server(lambda: StubProtocol(answer), host, 0, backlog=8192)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-chunks", type=int, default=4)
    parser.add_argument("--chunk-tokens", type=int, default=16)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--has-status", action="store_true")
    args = parser.parse_args()
    answer = ScriptedAnswer(
        num_chunks=args.num_chunks,
        chunk_tokens=args.chunk_tokens,
        delay_s=args.delay_ms / 1000,
        is_stock=args.stock,
        has_status=args.has_status,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
