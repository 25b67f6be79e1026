"""Answers that go on where another engine was cut: what the last tokens of a prompt did to the grammar.

A router continues a cut answer from its prompt and the tokens generated so far, and says with
``rose_generated`` how many those are. vLLM takes them all for a prompt and would begin the grammar anew.
Promises that a request waits, as for any grammar, until its own has been advanced over those tokens, and that
a request whose tokens the grammar refuses, or whose arguments the reasoning parser refuses, fails alone.
Never runs in the step loop: the threads that compile grammars advance them, too.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm.v1.request import Request

logger = logging.getLogger(__name__)

GENERATED_KEY = "rose_generated"
"""In ``vllm_xargs``: how many tokens at the end of the prompt were generated before."""
REASONING_ENDED_KEY = "rose_reasoning_ended"
"""In ``vllm_xargs``: 1 or 0 where the front has found whether the prompt ends the reasoning."""
TEMPLATE_KWARGS_KEY = "rose_chat_template_kwargs"
"""In ``vllm_xargs``: JSON of what the chat template was given, which the reasoning parser goes by."""


def take_over(request: Request, manager: Any) -> None:
    """Makes a request with a grammar go on from its generated tokens. Call before it is queued.

    ``manager``: vLLM's StructuredOutputManager, which has begun to compile the grammar.
    """
    structured, tokens = request.structured_output_request, request.prompt_token_ids
    if structured is None or tokens is None or not isinstance(compiled := structured._grammar, Future):
        return
    extra = request.sampling_params.extra_args or {}
    if REASONING_ENDED_KEY in extra:
        structured.reasoning_ended = bool(extra[REASONING_ENDED_KEY])
    if (kwargs := _object(extra.get(TEMPLATE_KWARGS_KEY))) is not None:
        structured.reasoning_parser_kwargs = {"chat_template_kwargs": kwargs}
    given = extra.get(GENERATED_KEY, 0)
    num_generated = given if isinstance(given, int) and 0 < given < len(tokens) else 0
    if num_generated or kwargs is not None:
        structured.grammar = manager.executor.submit(_ready, request, num_generated, compiled, manager)


def _ready(request: Request, num_generated: int, compiled: Future[Any], manager: Any) -> Any:
    """Returns the grammar as the request needs it. Runs in the thread that compiled it, or in another one:
    the grammar was put into their queue first, so that waiting for it can't stop them all.

    Raises: whatever a parser or a grammar raises; vLLM fails the request, as if it had not compiled.
    """
    grammar = compiled.result()
    try:
        manager._get_reasoner(request)  # in a step its errors would end the engine
        return _advanced(request, num_generated, grammar, manager) if num_generated else grammar
    except Exception as error:
        logger.warning("grammar not continued request=%s error=%s", request.request_id, error)
        raise


def _object(text: object) -> dict[str, Any] | None:
    """Returns a JSON object; None for anything else, as a client may send what it likes."""
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _advanced(request: Request, num_generated: int, grammar: Any, manager: Any) -> Any:
    """Returns the grammar, advanced as if the request had generated the tokens itself."""
    tokens, structured = list(request.prompt_token_ids), request.structured_output_request
    alone = replace(structured, _grammar=grammar)
    before = SimpleNamespace(
        request_id=request.request_id,
        use_structured_output=True,
        prompt_token_ids=tokens[:-num_generated],
        all_token_ids=tokens,
        structured_output_request=alone,
    )
    if not manager.accept_tokens(before, tokens[-num_generated:]):
        raise ValueError(
            f"the grammar allows not all of the {num_generated} tokens that were generated before"
        )
    structured.reasoning_ended, structured.reasoner = alone.reasoning_ended, alone.reasoner
    return grammar
