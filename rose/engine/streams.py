"""What streams hold back until their interval is full, sent at once.

Owns one reach into vLLM's output processor (as of 0.32), which has no public way to do it. Promises that no
token is sent twice or out of order. Runs on the API server's event loop.
"""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import OutputProcessor


def send_held_back(processor: OutputProcessor) -> None:
    """Send every token that has come from the engine core.

    Why: a chunk with tokens from before and after a change of weights can be tagged with one version alone.
    Call while the engine is paused.
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
