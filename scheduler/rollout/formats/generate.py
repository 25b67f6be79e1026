"""vLLM's /inference/v1/generate: token ids in, token ids out, run as a completion.

Owns: its requests and answers, and the translation of sampling parameters.
Promises: every answer says which worker and which weights made each token, how often the request was resumed,
and how much of its prompt was cached.
Never does: I/O.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rose.http import SO_FAR
from rose.scheduler.rollout.formats.bodies import BadRequest, Json, TokenIds, encode
from rose.scheduler.rollout.formats.completions import CheckRoom, ClientCall, Single, fan_out, usage_of
from rose.scheduler.rollout.formats.events import Chunk
from rose.scheduler.rollout.formats.resume import (
    REASONING_ENDED,
    TEMPLATE_KWARGS,
    Accumulated,
    Span,
    has_grammar,
)
from rose.scheduler.rollout.formats.routed import PROMPT_START

_SAMPLING = frozenset(
    (
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "repetition_detection",
        "repetition_penalty",
        PROMPT_START,
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "stream_interval",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
        "vllm_xargs",
        "watermarking",
    )
)
"""Sampling parameters that have the same name in /v1/completions."""
_IGNORED = frozenset(("detokenize", "output_kind", "skip_clone", "truncate_prompt_tokens", "guided_decoding"))
"""Parameters that change nothing, because an answer always holds ids and text."""
_WHOLE = ("stop", "length")
"""The reasons for which an answer ends, and is not cut."""
TOKEN_PREFIX = "token_id:"


def token_logprobs(logprobs: Mapping[str, Any], token_ids: Sequence[int]) -> list[Json]:
    """Turns completion logprobs named `token_id:N` into a list of tokens with their alternatives.

    Each token has both spellings: the number, which vLLM 0.32's generate endpoint gives, and the string,
    which completions give and some clients read.
    """
    tops = logprobs.get("top_logprobs") or [None] * len(token_ids)
    return [
        {
            **_token(token, value),
            "top_logprobs": [
                _token(int(name.removeprefix(TOKEN_PREFIX)), each) for name, each in (top or {}).items()
            ],
        }
        for token, value, top in zip(token_ids, logprobs["token_logprobs"], tops, strict=True)
    ]


def _token(token: int, logprob: float | None) -> Json:
    return {"token_id": token, "token": f"{TOKEN_PREFIX}{token}", "logprob": logprob, "rank": None}


def weight_versions(spans: Sequence[Span]) -> list[Json]:
    """Returns the spans of equal weights over the output's tokens; ends are exclusive."""
    ends = accumulate(span.num_tokens for span in spans)
    return [
        {"start": end - span.num_tokens, "end": end, "version": version_of(span)}
        for span, end in zip(spans, ends, strict=True)
    ]


def version_of(span: Span) -> str | None:
    return str(span.weight_version) if span.weight_version is not None else None


def sampling(given: object, names: Mapping[str, str], ignored: frozenset[str]) -> Json:
    """Translates sampling parameters to the names of /v1/completions.

    `names`: other names for some parameters. `ignored`: further parameters to leave out.

    Raises:
        BadRequest: `given` is not an object, or it holds a parameter that can't be passed on.
    """
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise BadRequest("sampling_params: expected an object")
    renamed = {names.get(name, name): value for name, value in given.items() if value is not None}
    known = {name: value for name, value in renamed.items() if name in _SAMPLING}
    if unknown := sorted(set(renamed) - set(known) - _IGNORED - ignored):
        raise BadRequest(
            f"sampling_params: {unknown[0]} is not supported; known: {', '.join(sorted(_SAMPLING))}"
        )
    return known


def _reasoning(body: Json) -> Json:
    """Returns what a request says of its prompt's reasoning, as ROSE's engines take it from a completion."""
    found: Json = {}
    if body.get("reasoning_ended") is not None:
        found[REASONING_ENDED] = int(body["reasoning_ended"] is True)
    kwargs = body.get("reasoning_parser_kwargs")
    if isinstance(kwargs, dict):
        template = kwargs.get("chat_template_kwargs")
        found[TEMPLATE_KWARGS] = encode(template if template is not None else {}).decode()
    return found


class TokenGenerate:
    """vLLM's /inference/v1/generate, whose answer is a superset of vLLM's. See shape.Format."""

    ids_key = "token_ids"
    end = b"data: [DONE]\n\n"

    def call(self, body: Json, check_room: CheckRoom | None) -> ClientCall:
        if body.get("features") or body.get("content_parts"):
            raise BadRequest("features: only text can be routed; send nothing but token_ids")
        prompt = body.get("token_ids")
        ids = prompt if isinstance(prompt, TokenIds) else None
        if ids is None or ids.is_empty:
            raise BadRequest("token_ids: expected a list of token ids that is not empty")
        passed_on = ("model", "stream", "stream_options", "cache_salt", "priority", "session_id", SO_FAR)
        completion = {name: body[name] for name in passed_on if body.get(name) is not None}
        given = body.get("sampling_params")
        completion |= sampling(given, {"extra_args": "vllm_xargs"}, frozenset())
        reasoning = _reasoning(body)
        if reasoning:
            completion["vllm_xargs"] = {**(completion.get("vllm_xargs") or {}), **reasoning}
        completion |= {"prompt": ids, "return_token_ids": True, "return_tokens_as_token_ids": True}
        call = fan_out(completion, check_room, shown_id=body.get("request_id"))
        for single in call.singles:
            single.generation.needs_text = given is None or given.get("detokenize") is not False
            single.generation.is_told_reasoning = bool(reasoning) and has_grammar(completion)
        return call

    def answer(self, call: ClientCall, model: str | None) -> Json:
        first = call.singles[0].generation
        return {
            "request_id": call.id,
            "model": model,
            "created": call.created,
            "choices": [self._choice(single) for single in call.singles],
            "usage": usage_of(call),
            "prompt_logprobs": None,
            "prompt_token_ids": first.prompt_token_ids,
            "kv_transfer_params": None,
        }

    def _choice(self, single: Single) -> Json:
        generation = single.generation
        logprobs = None
        if generation.logprobs is not None:
            logprobs = {"content": token_logprobs(generation.logprobs, generation.token_ids)}
        return {
            "index": single.index,
            "token_ids": generation.token_ids,
            "text": generation.text,
            "logprobs": logprobs,
            **_finish(generation),
        }

    def stream_chunk(self, call: ClientCall, single: Single, chunk: Chunk, model: str | None) -> Json:
        choice: Json = {"index": single.index, "token_ids": list(chunk.token_ids), "text": chunk.text}
        if chunk.logprobs is not None:
            choice["logprobs"] = {"content": token_logprobs(chunk.logprobs, chunk.token_ids)}
        if news := _news(single.generation, chunk):
            choice["rose"] = news
        return {"request_id": call.id, "model": model, "choices": [choice]}

    def stream_end(self, call: ClientCall, single: Single, model: str | None) -> Json:
        choice = {"index": single.index, "token_ids": [], "text": "", **_finish(single.generation)}
        return {"request_id": call.id, "model": model, "choices": [choice]}

    def stream_usage(self, call: ClientCall, model: str | None) -> Json | None:
        if not call.wants_usage:
            return None
        return {"request_id": call.id, "model": model, "choices": [], "usage": usage_of(call)}


def _news(generation: Accumulated, chunk: Chunk) -> Json:
    """Returns what a client has to know with these tokens, if the stream breaks off behind them: who made
    them, once, and whether they are the last."""
    news: Json = generation.spans[-1].as_json() if generation.begins_span(chunk) else {}
    news.pop("tokens", None)
    if chunk.finish_reason in _WHOLE:
        news |= {"finish_reason": chunk.finish_reason}
    return news


def _finish(generation: Accumulated) -> Json:
    return {
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
        "routed_experts": generation.merged_experts(),
        "weight_versions": weight_versions(generation.spans),
        "rose": generation.provenance(),
    }
