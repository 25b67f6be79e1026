"""The composition of a scheduled step, as the step-time model sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The tokens of one step. ``context_tokens`` is the sum of the decoding sequences' context lengths."""

    prefill_tokens: int
    num_decodes: int
    context_tokens: int


def shape_of(output: SchedulerOutput, requests: Mapping[str, Request]) -> StepShape:
    """Returns the shape of a step that vLLM has just scheduled; its tokens already count as computed."""
    prefill = decodes = context = 0
    for request_id, num_tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        computed_before = request.num_computed_tokens - num_tokens
        if num_tokens == 1 and computed_before >= request.num_prompt_tokens:
            decodes += 1
            context += computed_before
        else:
            prefill += num_tokens
    return StepShape(prefill_tokens=prefill, num_decodes=decodes, context_tokens=context)
