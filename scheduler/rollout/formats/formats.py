"""The ways in which clients ask for tokens, all of them run as completions.

Owns: Format, what a path's requests and answers look like; /inference/v1/generate and SGLang's /generate.
Promises: every answer says which worker and weights made each token, how often it was resumed, what was
cached.
Never does: I/O. /v1/completions itself is in completions.py.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from rose.scheduler.rollout.formats.bodies import BadRequest, Json, TokenIds
from rose.scheduler.rollout.formats.completions import Call, Single, fan_out, usage_of
from rose.scheduler.rollout.formats.resume import Accumulated, Chunk, Span

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
        "watermarking",
    )
)
"""Sampling parameters that /v1/completions takes by the same name."""
_IGNORED = frozenset(("detokenize", "output_kind", "skip_clone", "truncate_prompt_tokens", "guided_decoding"))
"""Without a meaning here: an answer holds ids and text anyway."""
_SGLANG_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_SGLANG_IGNORED = frozenset(("no_stop_trim", "custom_params", "stop_regex"))
_PREFIX = "token_id:"


class Format(Protocol):
    """One path's shape of requests and answers."""

    ids_key: str
    """Where a request has its prompt's ids."""
    end: bytes
    """What ends a stream."""

    def call(self, body: Json) -> Call:
        """Raises: BadRequest."""

    def answer(self, call: Call, model: str | None) -> object: ...

    def stream_chunk(self, call: Call, single: Single, chunk: Chunk, model: str | None) -> Json: ...

    def stream_end(self, call: Call, single: Single, model: str | None) -> Json: ...

    def stream_usage(self, call: Call, model: str | None) -> Json | None: ...


def token_logprobs(logprobs: Mapping[str, Any], token_ids: Sequence[int]) -> list[Json]:
    """vLLM's completion logprobs with `token_id:N` names, as a list of tokens with their alternatives.

    Both spellings of a token: the number that vLLM 0.32's generate endpoint gives, and the string that
    completions give and some clients read.
    """
    tops = logprobs.get("top_logprobs") or [None] * len(token_ids)
    return [
        {
            **_token(token, value),
            "top_logprobs": [
                _token(int(name.removeprefix(_PREFIX)), each) for name, each in (top or {}).items()
            ],
        }
        for token, value, top in zip(token_ids, logprobs["token_logprobs"], tops, strict=True)
    ]


def _token(token: int, logprob: float | None) -> Json:
    return {"token_id": token, "token": f"{_PREFIX}{token}", "logprob": logprob, "rank": None}


def weight_versions(spans: Sequence[Span]) -> list[Json]:
    """Spans of equal weights over the output's tokens, ends exclusive."""
    ends = accumulate(span.num_tokens for span in spans)
    return [
        {"start": end - span.num_tokens, "end": end, "version": _version(span)}
        for span, end in zip(spans, ends, strict=True)
    ]


def _version(span: Span) -> str | None:
    return str(span.weight_version) if span.weight_version is not None else None


def _sampling(given: object, names: Mapping[str, str], ignored: frozenset[str]) -> Json:
    """Sampling parameters under the names of /v1/completions.

    Raises:
        BadRequest: not an object, or a parameter that can't be passed on.
    """
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise BadRequest("sampling_params: want an object")
    renamed = {names.get(name, name): value for name, value in given.items() if value is not None}
    known = {name: value for name, value in renamed.items() if name in _SAMPLING}
    if unknown := sorted(set(renamed) - set(known) - ignored):
        raise BadRequest(
            f"sampling_params: {unknown[0]} is not supported; known: {', '.join(sorted(_SAMPLING))}"
        )
    return known


class TokenGenerate:
    """vLLM's /inference/v1/generate: ids in, ids out. A superset of its answer."""

    ids_key = "token_ids"
    end = b"data: [DONE]\n\n"

    def call(self, body: Json) -> Call:
        if body.get("features") or body.get("content_parts"):
            raise BadRequest("features: only text can be routed; send token_ids alone")
        prompt = body.get("token_ids")
        ids = prompt if isinstance(prompt, TokenIds) else None
        if ids is None or ids.is_empty:
            raise BadRequest("token_ids: want a list of token ids, not empty")
        passed_on = ("model", "stream", "stream_options", "cache_salt", "priority", "session_id")
        completion = {name: body[name] for name in passed_on if body.get(name) is not None}
        completion |= _sampling(body.get("sampling_params"), {}, _IGNORED)
        completion |= {"prompt": ids, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return fan_out(completion, shown_id=body.get("request_id"))

    def answer(self, call: Call, model: str | None) -> Json:
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

    def stream_chunk(self, call: Call, single: Single, chunk: Chunk, model: str | None) -> Json:
        choice: Json = {"index": single.index, "token_ids": list(chunk.token_ids), "text": chunk.text}
        if chunk.logprobs is not None:
            choice["logprobs"] = {"content": token_logprobs(chunk.logprobs, chunk.token_ids)}
        return {"request_id": call.id, "model": model, "choices": [choice]}

    def stream_end(self, call: Call, single: Single, model: str | None) -> Json:
        choice = {"index": single.index, "token_ids": [], "text": "", **_finish(single.generation)}
        return {"request_id": call.id, "model": model, "choices": [choice]}

    def stream_usage(self, call: Call, model: str | None) -> Json | None:
        if not call.wants_usage:
            return None
        return {"request_id": call.id, "model": model, "choices": [], "usage": usage_of(call)}


def _finish(generation: Accumulated) -> Json:
    return {
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
        "weight_versions": weight_versions(generation.spans),
        "rose": generation.provenance(),
    }


class SglangGenerate:
    """SGLang's /generate, as RL trainers use it: `text` or `input_ids`, one or a batch."""

    ids_key = "input_ids"
    end = b"data: [DONE]\n\n"

    def call(self, body: Json) -> Call:
        prompt = body.get("input_ids") if body.get("input_ids") is not None else body.get("text")
        if prompt is None:
            raise BadRequest("input_ids: want token ids here, or a string as text")
        given = body.get("sampling_params")
        if isinstance(given, list):
            raise BadRequest("sampling_params: want one object for the whole batch")
        completion = _sampling(given, _SGLANG_NAMES, _IGNORED | _SGLANG_IGNORED)
        # SGLang's own defaults, where they differ.
        completion = {"max_tokens": 128, "temperature": 1.0, **completion}
        if body.get("return_logprob"):
            completion["logprobs"] = body.get("top_logprobs_num") or 0
        for name in ("stream", "model", "session_id"):
            if body.get(name) is not None:
                completion[name] = body[name]
        completion |= {"prompt": prompt, "return_token_ids": True, "return_tokens_as_token_ids": True}
        rid = body.get("rid")
        return fan_out(completion, shown_id=rid if isinstance(rid, str) else None)

    def answer(self, call: Call, model: str | None) -> object:
        answers = [self._one(call, single) for single in call.singles]
        return answers if call.is_batch else answers[0]

    def _one(self, call: Call, single: Single) -> Json:
        generation = single.generation
        reason: Json = {"type": generation.finish_reason}
        if generation.finish_reason == "length":
            reason["length"] = generation.num_tokens
        if generation.stop_reason is not None:
            reason["matched"] = generation.stop_reason
        newest = generation.spans[-1] if generation.spans else None
        meta: Json = {
            "id": call.id if len(call.singles) == 1 else f"{call.id}-{single.index}",
            "finish_reason": reason if generation.finish_reason is not None else None,
            "prompt_tokens": usage_of(call, [single])["prompt_tokens"],
            "completion_tokens": generation.num_tokens,
            "cached_tokens": generation.cached_tokens or 0,
            "weight_version": _version(newest) if newest is not None else None,
            "weight_versions": weight_versions(generation.spans),
            "rose": generation.provenance(),
        }
        if generation.logprobs is not None:
            values = generation.logprobs["token_logprobs"]
            pairs = zip(values, generation.token_ids, strict=True)
            meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
            meta["input_token_logprobs"] = []
            if any(generation.logprobs["top_logprobs"]):
                meta["output_top_logprobs"] = [
                    [[value, int(name.removeprefix(_PREFIX)), None] for name, value in (top or {}).items()]
                    for top in generation.logprobs["top_logprobs"]
                ]
        return {"text": generation.text, "output_ids": generation.token_ids, "meta_info": meta}

    def stream_chunk(self, call: Call, single: Single, chunk: Chunk, model: str | None) -> Json:
        """SGLang streams what there is so far, not what came anew."""
        return {**self._one(call, single), "index": single.index}

    def stream_end(self, call: Call, single: Single, model: str | None) -> Json:
        return {**self._one(call, single), "index": single.index}

    def stream_usage(self, call: Call, model: str | None) -> Json | None:
        return None
