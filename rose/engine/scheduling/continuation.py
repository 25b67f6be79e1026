"""Continues answers that another engine has begun: the last tokens of a prompt count as generated.

A router continues a cut answer from its prompt and the tokens generated so far, and says with
``rose_generated`` how many of them were generated. vLLM alone would take all of them for a prompt. It would
start a grammar again, and penalties, bad words and the detection of repetitions would not see the tokens.

Promises that a request waits, as for any grammar, until its own has been advanced over those tokens, and that
a request whose tokens the grammar refuses, or whose arguments the reasoning parser refuses, fails alone. Once
scheduled, the request is in every respect like a preempted one that goes on in its own engine.
Grammars are never advanced in the step loop: the threads that compile them do it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request

logger = logging.getLogger(__name__)

GENERATED_KEY = "rose_generated"
"""In ``vllm_xargs``: how many tokens at the end of the prompt were generated before."""
REASONING_ENDED_KEY = "rose_reasoning_ended"
"""In ``vllm_xargs``: 1 or 0 where the front has found whether the prompt ends the reasoning."""
TEMPLATE_KWARGS_KEY = "rose_chat_template_kwargs"
"""In ``vllm_xargs``: JSON of what the chat template was given, which the reasoning parser goes by."""


def num_generated(params: SamplingParams | None, tokens: Sequence[int] | None) -> int:
    """Returns how many tokens at the end of a prompt were generated before; 0 if the request names no
    number, or one that is not above 0 and below the prompt's length."""
    extra = params.extra_args if params is not None else None
    given = extra.get(GENERATED_KEY, 0) if extra is not None and tokens is not None else 0
    return given if type(given) is int and tokens is not None and 0 < given < len(tokens) else 0


def count_as_output(request: Request, data: NewRequestData) -> None:
    """Moves the generated tokens of a request from its prompt to its output, here and in what its worker is
    sent. Call once it has been scheduled for the first time.

    Not earlier, because vLLM asserts that no more than the prompt of a new request is cached. Model Runner V1
    takes no output with a new request: its rank splits the tokens itself (continue_from_generated_tokens() in
    hooks/patches.py).
    """
    params, tokens = request.sampling_params, request.prompt_token_ids
    count = num_generated(params, tokens)
    if not count or request.num_output_tokens:
        return  # the request was moved before, and then preempted
    request.prompt_token_ids = tokens[:-count]
    request.num_prompt_tokens -= count
    request._output_token_ids.extend(tokens[-count:])
    request.max_tokens += count
    params.max_tokens = request.max_tokens
    if params.min_tokens:
        params.min_tokens += count
    if data.prefill_token_ids is not None:  # Model Runner V2
        data.prompt_token_ids = request.prompt_token_ids


def take_over(request: Request, manager: Any) -> None:
    """Makes a request go on from its generated tokens, with its grammar if it has one. Call before it is
    queued.

    ``manager``: vLLM's StructuredOutputManager, which has begun to compile the grammar.
    """
    structured, tokens = request.structured_output_request, request.prompt_token_ids
    extra = (request.sampling_params.extra_args if request.sampling_params is not None else None) or {}
    if request.resumable or request.prompt_embeds is not None:
        extra.pop(GENERATED_KEY, None)  # their prompts grow, or hold no tokens
    if structured is None or tokens is None or not isinstance(compiled := structured._grammar, Future):
        return
    if REASONING_ENDED_KEY in extra:
        structured.reasoning_ended = bool(extra[REASONING_ENDED_KEY])
    if (kwargs := _object(extra.get(TEMPLATE_KWARGS_KEY))) is not None:
        structured.reasoning_parser_kwargs = {"chat_template_kwargs": kwargs}
    count = num_generated(request.sampling_params, tokens)
    if count or kwargs is not None:
        structured.grammar = manager.executor.submit(_ready, request, count, compiled, manager)


def _ready(request: Request, count: int, compiled: Future[Any], manager: Any) -> Any:
    """Returns the grammar, advanced over the request's generated tokens. Runs in one of the threads that
    compile grammars. Waiting for ``compiled`` can't block them all, because it was queued first.

    Raises: whatever a parser or a grammar raises. vLLM then fails the request, as if the grammar had not
    compiled.
    """
    grammar = compiled.result()
    try:
        manager._get_reasoner(request)  # an error of it in a step would end the engine
        return _advanced(request, count, grammar, manager) if count else grammar
    except Exception as error:
        logger.warning("grammar not continued request=%s error=%s", request.request_id, error)
        raise


def _object(text: object) -> dict[str, Any] | None:
    """Returns the JSON object in ``text``; None for anything else, because clients may send anything."""
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _advanced(request: Request, count: int, grammar: Any, manager: Any) -> Any:
    """Returns the grammar, advanced as if the request had generated the tokens itself."""
    tokens, structured = list(request.prompt_token_ids), request.structured_output_request
    alone = replace(structured, _grammar=grammar)
    before = SimpleNamespace(
        request_id=request.request_id,
        use_structured_output=True,
        prompt_token_ids=tokens[:-count],
        all_token_ids=tokens,
        structured_output_request=alone,
    )
    if not manager.accept_tokens(before, tokens[-count:]):
        raise ValueError(f"the grammar does not allow all of the {count} tokens that were generated before")
    structured.reasoning_ended, structured.reasoner = alone.reasoning_ended, alone.reasoner
    return grammar
