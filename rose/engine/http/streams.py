"""Pauses an engine so that its streams have every token of the steps before, including the tokens that they
hold back until their interval is full.

Owns the uses of the internals of vLLM's client and output processor, for which there is no public method.
Promises that no token is sent twice or out of order, and that an engine whose vLLM lacks what is used here
does not start. It has run with vLLM 0.32. Runs on the API server's event loop.
"""

from __future__ import annotations

import asyncio
import inspect
from types import CodeType
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from rose.engine.vllm_version import lacks

_STATE_FIELDS = ("detokenizer", "output_kind", "queue", "sent_tokens_offset", "stream_interval")
_OUTPUT_PARAMETERS = ["self", "new_token_ids", "pooling_output", "finish_reason", "stop_reason"]


def check_output_processor(
    processor: type[object] = OutputProcessor,
    state: type[object] = RequestState,
    core: type[object] = AsyncMPClient,
) -> None:
    """Checks that this vLLM's output processor and its client of engine cores have what this module needs.

    Raises: ConfigError, which names what is missing.
    """
    needed = [(state, _STATE_FIELDS), (processor, ("request_states",)), (core, ("outputs_queue",))]
    lacking = [
        f"{owner.__name__}.{name}" for owner, names in needed for name in names if name not in _fields(owner)
    ]
    if not hasattr(core, "pause_scheduler_async"):
        lacking.append(f"{core.__name__}.pause_scheduler_async")
    make: Any = getattr(state, "make_request_output", None)
    if make is None or [*inspect.signature(make).parameters][: len(_OUTPUT_PARAMETERS)] != _OUTPUT_PARAMETERS:
        lacking.append(f"{state.__name__}.make_request_output({', '.join(_OUTPUT_PARAMETERS[1:])})")
    if lacking:
        raise lacks(", ".join(lacking))


def _fields(owner: type[object]) -> tuple[str, ...]:
    """Returns the names in the initializer, which include the instance's fields. There is no instance yet."""
    code: CodeType | None = getattr(inspect.unwrap(owner.__init__), "__code__", None)
    return code.co_names if code is not None else ()


async def pause_steps(client: AsyncLLM) -> None:
    """Holds back every step. Returns when each stream has all tokens of the steps before.

    Why not vLLM's own pause_generation(): it sleeps for 20 ms where this waits for the output processor, and
    it leaves the tokens that streams hold back.
    """
    core: Any = client.engine_core
    await core.pause_scheduler_async(mode="keep", clear_cache=False)
    # The outputs of the last steps came before the answer. Once the empty ones are taken, they were
    # processed.
    core.outputs_queue.put_nowait(EngineCoreOutputs())
    while client.is_running and not core.outputs_queue.empty():
        await asyncio.sleep(0)
    send_held_back(client.output_processor)


def send_held_back(processor: OutputProcessor) -> None:
    """Sends every token that has come from the engine core. Call while the engine is paused.

    Why: a chunk can be tagged with one weight version only, so it must not hold tokens of two.
    """
    for state in processor.request_states.values():
        if (
            state.stream_interval > 1
            and state.queue is not None
            and state.output_kind is RequestOutputKind.DELTA
        ):
            _send(state)


def _send(state: Any) -> None:
    held = state.detokenizer.output_token_ids[state.sent_tokens_offset :]
    if not held:
        return
    interval, state.stream_interval = state.stream_interval, 1
    try:
        output = state.make_request_output(held, None, None, None)
    finally:
        state.stream_interval = interval
    state.sent_tokens_offset += len(held)
    if output is not None:
        state.queue.put(output)
