"""The engine's own API server with other parsers than its flags name: the same engine, at other paths.

A middleware for vLLM's ``--middleware``. /parsers/TOOLS/REASONING/v1/... is answered by the server's own
routes with vLLM's own state, made as for a server that has these parsers. So one engine answers for them
all.
"""

import copy
from collections import deque
from typing import Any

from starlette.datastructures import State
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.v1.engine.output_processor import RequestOutputCollector

PREFIX = "parsers"


class OtherParsers:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._states: dict[tuple[str, str], State] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = scope["path"].split("/") if scope["type"] == "http" else []
        if len(parts) > 4 and parts[1] == PREFIX:
            path = "/" + "/".join(parts[4:])
            alike = copy.copy(scope["app"])
            alike.state = await self._state(scope["app"], parts[2], parts[3])
            scope = {**scope, "app": alike, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)

    async def _state(self, app: Any, tools: str, reasoning: str) -> State:
        if (tools, reasoning) not in self._states:
            engine, args = app.state.engine_client, copy.deepcopy(app.state.args)
            args.tool_call_parser, args.reasoning_parser = tools, reasoning
            args.structured_outputs_config.reasoning_parser = reasoning
            state = State()
            await init_app_state(engine, state, args, await engine.get_supported_tasks())
            self._states[tools, reasoning] = state
        return self._states[tools, reasoning]


class SingleOutputs:
    """A middleware whose server sends each output of an engine's step on its own.

    vLLM merges the deltas of a request whose handler is held up, and its deepseek_r1 parser, for one, then
    misreads them: what an engine says would depend on the load of its machine. A front needs none of this: it
    waits until a handler has taken the last token.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        replaced: Any = RequestOutputCollector
        replaced.put, replaced.get, replaced.get_nowait = _put, _get, _get_nowait

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _put(collector: Any, output: Any) -> None:
    vars(collector).setdefault("outputs", deque()).append(output)
    collector.ready.set()


def _get_nowait(collector: Any) -> Any:
    outputs = vars(collector).get("outputs")
    if not outputs:
        return None
    output = outputs.popleft()
    if not outputs:
        collector.ready.clear()
    if isinstance(output, Exception):
        raise output
    return output


async def _get(collector: Any) -> Any:
    await collector.ready.wait()
    return _get_nowait(collector)
