"""Sends at once the tokens that streams hold back until their interval is full.

Owns one use of the internals of vLLM's output processor, which has no public way to do it. Promises that no
token is sent twice or out of order, and that an engine whose vLLM lacks what is used here does not start. It
has run with vLLM 0.32. Runs on the API server's event loop.
"""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from rose.errors import ConfigError

_STATE_FIELDS = ("detokenizer", "output_kind", "queue", "sent_tokens_offset", "stream_interval")
_OUTPUT_PARAMETERS = ["self", "new_token_ids", "pooling_output", "finish_reason", "stop_reason"]


def check_output_processor(
    processor: type[object] = OutputProcessor, state: type[object] = RequestState
) -> None:
    """Checks that this vLLM's output processor has what `send_held_back` needs.

    Raises: ConfigError, which names what is missing.
    """
    lacking = [f"{state.__name__}.{name}" for name in _STATE_FIELDS if name not in _fields(state)]
    if "request_states" not in _fields(processor):
        lacking.append(f"{processor.__name__}.request_states")
    make: Any = getattr(state, "make_request_output", None)
    if make is None or [*inspect.signature(make).parameters][: len(_OUTPUT_PARAMETERS)] != _OUTPUT_PARAMETERS:
        lacking.append(f"{state.__name__}.make_request_output({', '.join(_OUTPUT_PARAMETERS[1:])})")
    if lacking:
        raise ConfigError(f"vLLM has no {', '.join(lacking)}: this version is not supported by rose")


def _fields(owner: type[object]) -> tuple[str, ...]:
    """Returns the names in the initializer, which include the instance's fields. There is no instance yet."""
    code: CodeType | None = getattr(owner.__init__, "__code__", None)
    return code.co_names if code is not None else ()


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
