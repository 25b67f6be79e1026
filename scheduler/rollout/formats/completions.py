"""The shape of /v1/completions: one call becomes single requests, their generations become one answer.

Owns: the fan-out of prompts x n, the merged JSON answer, the events of a streamed answer.
Promises: without a fault, the choices equal those of vLLM, plus a `rose` field.
Never does: I/O.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rose.http import SO_FAR
from rose.scheduler.rollout.formats.bodies import BadRequest, Json, TokenIds
from rose.scheduler.rollout.formats.events import Chunk
from rose.scheduler.rollout.formats.resume import Accumulated, known_prompt, text_offsets
from rose.scheduler.rollout.formats.routed import PROMPT_START, RoutedExperts

_WHOLE_ONLY = ("use_beam_search", "echo", "prompt_embeds", "kv_transfer_params", "ec_transfer_params")


def can_stream(body: Mapping[str, Any]) -> bool:
    """Returns whether vLLM can stream what this call asks for; otherwise the call is forwarded to one worker
    whole."""
    return not any(body.get(name) for name in _WHOLE_ONLY) and body.get("prompt_logprobs") is None


def split_prompts(prompt: object) -> list[str | TokenIds]:
    """Turns a string, token ids, or a list of either into a list of single prompts.

    Raises:
        BadRequest: the prompt is none of these, or empty.
    """
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if isinstance(prompt, TokenIds) and not prompt.is_empty:
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _are_ids(prompt):
            return [TokenIds.of(prompt)]
        if all((isinstance(p, str) and p) or (_are_ids(p) and p) for p in prompt):
            return [p if isinstance(p, str) else TokenIds.of(p) for p in prompt]
    raise BadRequest("prompt: expected a string, a list of token ids, or a list of either; none may be empty")


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """One prompt with n = 1: the request of one turn, which is what the router places."""

    index: int
    prompt: str | TokenIds
    """It identifies the trajectory: the next turn's prompt begins with it and the generated tokens."""
    generation: Accumulated


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCall:
    """One client's call and its single requests."""

    body: Mapping[str, Any]
    n: int
    singles: Sequence[Single]
    is_batch: bool = False
    """The client sent a list of prompts, or n above 1."""
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def wants_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def wants_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))


CheckRoom = Callable[[int], None]
"""Is told the number of a call's single requests before they are made, which takes about 10 us for each. None
stands for a retry of a call that has its room already."""


def fan_out(body: Mapping[str, Any], check_room: CheckRoom | None, shown_id: object = None) -> ClientCall:
    """Splits a call into single requests, in vLLM's order of choices (prompt-major).

    Child i of a seeded call gets seed + i, as in vLLM. An unseeded child stays unseeded, because a generator
    per request slows vLLM's sampler. Engines behind one router therefore need seeds of their own (rose serve
    gives each one), or siblings on different engines could be equal.

    A call whose stream broke off says in `rose_so_far` which tokens have arrived; it goes on from there.

    `shown_id`: the id of the answer. Workers get an id of the router's, since two clients' ids could be
    equal.

    Raises:
        BadRequest: prompt, n, max_tokens or seed is malformed, or the call can't be continued.
        RoseError: whatever `check_room` raises.
    """
    prompts = split_prompts(body.get("prompt"))
    n, call_id = checked_n(body), uuid.uuid4().hex
    if (num_singles := n * len(prompts)) > _MAX_SINGLES:
        raise BadRequest(f"n: {len(prompts)} prompts x {n} are more than {_MAX_SINGLES}; send fewer at once")
    if check_room is not None:
        check_room(num_singles)
    singles = []
    for index, (prompt, child) in enumerate((p, i) for p in prompts for i in range(n)):
        request = {**child_body(body, child), "prompt": prompt, "request_id": f"{call_id}-{index}"}
        generation = Accumulated(
            request=request,
            prompt_token_ids=known_prompt(request),
            routed_experts=RoutedExperts(request.get(PROMPT_START) or 0),
        )
        if (given := body.get(SO_FAR)) is not None:
            generation.resume(_checked_so_far(given, body, generation, len(prompts) * n))
        singles.append(Single(index=index, prompt=prompt, generation=generation))
    name = shown_id if isinstance(shown_id, str) and shown_id else f"cmpl-{call_id}"
    is_batch = n > 1 or isinstance(body.get("prompt"), list)
    return ClientCall(body=body, n=n, singles=singles, is_batch=is_batch, id=name)


def _checked_so_far(given: object, body: Mapping[str, Any], generation: Accumulated, count: int) -> list[int]:
    """Returns the tokens that have arrived. Raises: BadRequest."""
    if not isinstance(given, list) or not _are_ids(given):
        raise BadRequest(f"{SO_FAR}: expected a list of token ids, got {str(given)[:40]!r}")
    if count != 1 or not body.get("stream") or not body.get("return_token_ids"):
        raise BadRequest(
            f"{SO_FAR}: only a stream with return_token_ids and one answer (n = 1, one prompt) can go on"
        )
    if generation.must_restart:
        raise BadRequest(
            f"{SO_FAR}: only a turn whose prompt is token ids, without stop strings or other parameters that"
            " have a state, can go on; leave it out, and drop the tokens that have arrived"
        )
    if len(given) > generation.max_tokens:
        raise BadRequest(f"{SO_FAR}: {len(given)} tokens, but max_tokens is {generation.max_tokens}")
    return given


_MAX_SINGLES = 2**16
"""The most single requests of one call: each costs the router some KB, and n costs the client a few bytes."""
_MAX_N = 16384
"""vLLM's own limit (VLLM_MAX_N_SEQUENCES)."""
_INTEGERS = ("max_tokens", "seed", "min_tokens", "stream_interval", PROMPT_START)
_COUNTS = ("n", *_INTEGERS, "max_completion_tokens", "max_new_tokens", "min_new_tokens")
_MAX_INTEGER = 2**63


def take_whole_numbers(body: Json) -> None:
    """Makes integers of counts such as 4.0, which vLLM takes: clients whose language has one kind of number
    send them."""
    for holder in (body, body.get("sampling_params")):
        if isinstance(holder, dict):
            for name in _COUNTS:
                if isinstance(value := holder.get(name), float) and value.is_integer():
                    holder[name] = int(value)


def checked_n(body: Mapping[str, Any]) -> int:
    """Returns n, and checks the other fields that the router itself uses.

    Raises:
        BadRequest: one of them is malformed.
    """
    n = body.get("n") if body.get("n") is not None else 1
    if type(n) is not int or n < 1:
        raise BadRequest(f"n: expected a positive integer, got {n!r}")
    if n > _MAX_N:
        raise BadRequest(f"n must be at most {_MAX_N}, got {n}; send several requests", "n")
    for name in _INTEGERS:
        value = body.get(name)
        if value is not None and (type(value) is not int or abs(value) >= _MAX_INTEGER):
            raise BadRequest(f"{name}: expected a 64-bit integer, got {str(value)[:40]!r}")
    if not isinstance(body.get("stream_options"), dict | None):
        raise BadRequest(f"stream_options: expected an object, got {body['stream_options']!r}")
    return n


_OF_THE_CALL = ("stream", "stream_options", "n", "request_id", SO_FAR)


def child_body(body: Mapping[str, Any], child: int) -> Json:
    """Returns what single request number `child` of a prompt takes over from the call."""
    seed = {"seed": body["seed"] + child} if body.get("seed") is not None else {}
    return {k: v for k, v in body.items() if k not in _OF_THE_CALL} | seed


def _envelope(call: ClientCall, model: str | None) -> Json:
    return {"id": call.id, "object": "text_completion", "created": call.created, "model": model}


def usage_of(call: ClientCall, singles: Sequence[Single] | None = None) -> Json:
    """Returns OpenAI's usage of a call, or of some of its singles. A prompt counts once, whatever n is."""
    of = call.singles if singles is None else singles
    prompts = of[:: call.n] if singles is None else of
    prompt_tokens = sum(_prompt_tokens(s.generation) for s in prompts)
    completion_tokens = sum(s.generation.num_tokens for s in of)
    cached = [s.generation.cached_tokens for s in of if s.generation.cached_tokens is not None]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached)} if cached else None,
    }


def _prompt_tokens(generation: Accumulated) -> int:
    if generation.num_prompt_tokens is not None:
        return generation.num_prompt_tokens
    ids = generation.prompt_token_ids  # the worker's count was lost with the finish
    return ids.count() if ids is not None else 0


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
        "routed_experts": generation.merged_experts(),
        "rose": generation.provenance(),
    }


class Completions:
    """OpenAI's /v1/completions as vLLM has it. See shape.Format."""

    ids_key = "prompt"
    end = b"data: [DONE]\n\n"

    def call(self, body: Json, check_room: CheckRoom | None) -> ClientCall:
        return fan_out(body, check_room)

    def answer(self, call: ClientCall, model: str | None) -> Json:
        returns_ids = bool(call.body.get("return_token_ids"))
        choices = [_choice(single, returns_ids) for single in call.singles]
        return {**_envelope(call, model), "choices": choices, "usage": usage_of(call)}

    def stream_chunk(self, call: ClientCall, single: Single, chunk: Chunk, model: str | None) -> Json:
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

    def stream_end(self, call: ClientCall, single: Single, model: str | None) -> Json:
        generation = single.generation
        choice: Json = {"index": single.index, "text": "", "logprobs": None}
        choice |= {"finish_reason": generation.finish_reason, "stop_reason": generation.stop_reason}
        choice["rose"] = generation.provenance()
        if (experts := generation.merged_experts()) is not None:
            choice["routed_experts"] = experts
        if call.body.get("return_token_ids"):
            choice["token_ids"] = []
        return {**_envelope(call, model), "choices": [choice]}

    def stream_usage(self, call: ClientCall, model: str | None) -> Json | None:
        if not call.wants_usage:
            return None
        return {**_envelope(call, model), "choices": [], "usage": usage_of(call)}
