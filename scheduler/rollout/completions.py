"""The shape of /v1/completions: one call into single requests, finished generations into one answer.

Owns: fanning out prompts x n, the merged JSON answer, the chunks of a streamed answer.
Promises: without a fault, choices equal those that vLLM would have given, plus a `rose` field.
Never does: I/O.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rose.scheduler.rollout.resume import Accumulated, Chunk, Json, text_offsets

_WHOLE_ONLY = ("use_beam_search", "echo", "prompt_embeds", "kv_transfer_params", "ec_transfer_params")


class BadRequest(ValueError):
    """The client's body can't be understood; answered 400."""


def can_stream(body: Mapping[str, Any]) -> bool:
    """Whether vLLM can stream what this call asks for. What it can't is passed to one worker as it is."""
    return not any(body.get(name) for name in _WHOLE_ONLY) and body.get("prompt_logprobs") is None


def split_prompts(prompt: object) -> list[str | list[int]]:
    """A string, token ids, or a list of either -> a list of single prompts.

    Raises:
        BadRequest: it is none of them, or empty.
    """
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _are_ids(prompt):
            return [prompt]
        if all((isinstance(p, str) and p) or (_are_ids(p) and p) for p in prompt):
            return prompt
    raise BadRequest("prompt: want a string, a list of token ids, or a list of either; none of them empty")


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """One prompt, n = 1: the unit that is routed."""

    index: int
    prompt: str | list[int]
    generation: Accumulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One client's call and what it was fanned out to."""

    body: Mapping[str, Any]
    n: int
    singles: Sequence[Single]
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def wants_stream(self) -> bool:
        return bool(self.body.get("stream"))


def fan_out(body: Mapping[str, Any]) -> Call:
    """Split a call into single requests, choices in vLLM's order (prompt-major).

    Seeds: child i of a seeded call gets seed + i, as in vLLM. An unseeded child stays unseeded: a generator
    per request slows vLLM's sampler. So engines behind one router need seeds of their own (rose serve gives
    each one), or siblings spread over them could be equal.

    Raises:
        BadRequest: prompt, n, max_tokens or seed is malformed.
    """
    prompts = split_prompts(body.get("prompt"))
    n = body.get("n") if body.get("n") is not None else 1
    if type(n) is not int or n < 1:
        raise BadRequest(f"n: want a positive integer, got {n!r}")
    for name in ("max_tokens", "seed", "min_tokens"):
        if body.get(name) is not None and type(body[name]) is not int:
            raise BadRequest(f"{name}: want an integer, got {body[name]!r}")
    call_id = uuid.uuid4().hex
    base = {k: v for k, v in body.items() if k not in ("stream", "stream_options", "n", "request_id")}
    singles = []
    for index, (prompt, child) in enumerate((p, i) for p in prompts for i in range(n)):
        seed = {"seed": body["seed"] + child} if body.get("seed") is not None else {}
        request = {**base, **seed, "prompt": prompt, "request_id": f"{call_id}-{index}"}
        singles.append(Single(index=index, prompt=prompt, generation=Accumulated(request=request)))
    return Call(body=body, n=n, singles=singles, id=f"cmpl-{call_id}")


def _envelope(call: Call, model: str | None) -> Json:
    return {"id": call.id, "object": "text_completion", "created": call.created, "model": model}


def _usage(call: Call) -> Json:
    prompt_tokens = sum(len(s.generation.prompt_token_ids or ()) for s in call.singles[:: call.n])
    completion_tokens = sum(s.generation.num_tokens for s in call.singles)
    cached = [s.generation.cached_tokens for s in call.singles if s.generation.cached_tokens is not None]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached)} if cached else None,
    }


def _choice(single: Single, returns_ids: bool) -> Json:
    generation = single.generation
    return {
        "index": single.index,
        "text": generation.text,
        "logprobs": generation.merged_logprobs(),
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
        "token_ids": generation.token_ids if returns_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": generation.prompt_token_ids if returns_ids else None,
        "routed_experts": None,
        "rose": generation.provenance(),
    }


def answer(call: Call, model: str | None) -> Json:
    """The plain JSON answer of a finished call."""
    returns_ids = bool(call.body.get("return_token_ids"))
    choices = [_choice(single, returns_ids) for single in call.singles]
    return {**_envelope(call, model), "choices": choices, "usage": _usage(call)}


def stream_chunk(call: Call, single: Single, chunk: Chunk, model: str | None) -> Json:
    """The streamed event for a chunk that was just added to the single's generation."""
    generation = single.generation
    choice: Json = {"index": single.index, "text": chunk.text, "logprobs": None, "finish_reason": None}
    choice["stop_reason"] = None
    if chunk.logprobs is not None:
        tokens = chunk.logprobs["tokens"]
        start = generation.num_printed - sum(len(token) for token in tokens)
        choice["logprobs"] = {**chunk.logprobs, "text_offset": text_offsets(tokens, start)}
    if call.body.get("return_token_ids"):
        choice["token_ids"] = list(chunk.token_ids)
        if generation.num_tokens == len(chunk.token_ids):
            choice["prompt_token_ids"] = generation.prompt_token_ids
    return {**_envelope(call, model), "choices": [choice]}


def stream_end(call: Call, single: Single, model: str | None) -> Json:
    """The event that finishes one choice."""
    generation = single.generation
    choice: Json = {"index": single.index, "text": "", "logprobs": None}
    choice |= {"finish_reason": generation.finish_reason, "stop_reason": generation.stop_reason}
    choice["rose"] = generation.provenance()
    if call.body.get("return_token_ids"):
        choice["token_ids"] = []
    return {**_envelope(call, model), "choices": [choice]}


def stream_usage(call: Call, model: str | None) -> Json | None:
    """The usage event, if the client asked for one."""
    if not (call.body.get("stream_options") or {}).get("include_usage"):
        return None
    return {**_envelope(call, model), "choices": [], "usage": _usage(call)}
