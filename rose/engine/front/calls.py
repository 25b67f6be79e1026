"""A request of vLLM's engine as a call of the router's token endpoint, and its answer as an engine's output.

Owns the translation in both directions. Promises that an answer's tokens come out in order, each once, with
its log-probabilities, and that a stop token comes together with the finish, as from an engine: vLLM leaves
its text out then. Never does I/O.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from http import HTTPStatus
from typing import Any

import numpy as np
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists

from rose.scheduler.rollout.formats.resume import must_restart

Json = dict[str, Any]

_ALWAYS = (
    # A worker would fill in what is missing from the model's generation config.
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_IF_GIVEN = (
    *("seed", "stop_token_ids", "ignore_eos", "logprobs", "logit_bias", "allowed_token_ids", "bad_words"),
    *("structured_outputs", "repetition_detection", "extra_args", "routed_experts_prompt_start"),
)
"""Stop strings and the other parameters of text are the front's own work."""
_NEVER = (
    *("prompt_logprobs", "prompt_logprob_token_ids", "logprob_token_ids", "trace_decode_token_ids"),
    *("thinking_token_budget",),
)
_FINISHES = {str(reason): reason for reason in FinishReason}
_UNFINISHED = (str(FinishReason.ABORT), str(FinishReason.ERROR))


def call_body(request: EngineCoreRequest, model: str) -> Json:
    """Returns the body for an engine's request; `model`: what it is for if it names no LoRA adapter.

    Raises: VLLMValidationError for what the router's token-level turns can't do.
    """
    params = _checked(request)
    is_streamed = wants_stream(params)
    body: Json = {
        "model": request.lora_request.lora_name if request.lora_request is not None else model,
        "token_ids": request.prompt_token_ids,
        "sampling_params": _sampling(params),
        "stream": is_streamed,
    }
    if is_streamed and params.output_kind is RequestOutputKind.DELTA:
        # A client of the worker itself would get its deltas so; parsers are best tried with these.
        body["sampling_params"]["stream_interval"] = _interval(params)
    names = ["cache_salt", "session_id"]
    if params.structured_outputs is not None:
        names += ["reasoning_ended", "reasoning_parser_kwargs"]  # they say where the grammar begins
    for name in names:
        if (value := getattr(request, name)) is not None:
            body[name] = value
    if request.priority:
        body["priority"] = request.priority
    return body


def wants_stream(params: SamplingParams) -> bool:
    """Returns whether the front has to see the tokens as they come: to hand them on, or to find a stop
    string. A whole answer can start again where a cut one can't be continued."""
    return params.output_kind is not RequestOutputKind.FINAL_ONLY or bool(params.stop)


def streams_single_tokens(params: SamplingParams) -> bool:
    """Returns whether a client gets a delta for each token, as parsers of vLLM expect them: some misread a
    delta in which a mark and text come together."""
    return params.output_kind is RequestOutputKind.DELTA and _interval(params) == 1


def _interval(params: SamplingParams) -> int:
    return int(params.stream_interval or 1)


def begins_anew(body: Json) -> bool:
    """Returns whether the call's parameters start again when its tokens are made elsewhere."""
    params = body["sampling_params"]
    return must_restart({**params, "vllm_xargs": params.get("extra_args")})


def _checked(request: EngineCoreRequest) -> SamplingParams:
    params = request.sampling_params
    if params is None or not request.prompt_token_ids or request.prompt_embeds is not None:
        raise VLLMValidationError("rose front generates text from token ids alone")
    if request.mm_features:
        raise VLLMValidationError("rose front takes text alone; a router sends other chats to one worker")
    if given := [name for name in _NEVER if getattr(params, name, None) is not None]:
        raise VLLMValidationError(f"{given[0]} is not supported by rose front", parameter=given[0])
    return params


def _sampling(params: SamplingParams) -> Json:
    given = {name: _plain(getattr(params, name)) for name in _IF_GIVEN if getattr(params, name, None)}
    if params.logprobs is not None:
        given["logprobs"] = params.logprobs  # 0 asks for the sampled token's own
    if params.seed is not None:
        given["seed"] = params.seed
    return {**{name: getattr(params, name) for name in _ALWAYS}, **given, "detokenize": False}


def _plain(value: Any) -> Any:
    """Returns a parameter as JSON; what vLLM has noted in it for itself is left out."""
    if is_dataclass(value) and not isinstance(value, type):
        fields = asdict(value).items()
        return {name: each for name, each in fields if each not in (None, False) and name[0] != "_"}
    return value


class Outputs:
    """Turns the parts of one answer into the outputs of an engine core."""

    def __init__(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        self._id = request.request_id
        self._stops = {*params.all_stop_token_ids, params.eos_token_id}
        self._num_logprobs = params.num_logprobs
        self._splits = streams_single_tokens(params)
        self._tokens: list[int] = []
        self._rows: list[Json] = []
        self.so_far: list[int] = []
        """All tokens that were handed on."""
        self.is_finished = False

    def drop_held(self) -> None:
        """Drops what was held back, as another router makes it again."""
        self._tokens, self._rows = [], []

    def take(self, part: Json) -> Iterator[EngineCoreOutput]:
        """Takes a streamed event, or the whole answer; yields what may be handed on.

        Raises: GracefulHTTPError if a worker ended the answer before it was whole; /v1/responses and
        /v1/messages would call it complete.
        """
        for choice in part.get("choices", ()):
            if self.is_finished:
                return
            self._tokens += choice.get("token_ids") or ()
            self._rows += (choice.get("logprobs") or {}).get("content") or ()
            if (reason := choice.get("finish_reason")) in _UNFINISHED:
                message = f"the worker ended the answer unfinished ({reason}); send the request again"
                raise GracefulHTTPError(message, HTTPStatus.BAD_GATEWAY)
            num_ready = self._num_ready() if reason is None else len(self._tokens) - 1
            if self._splits:  # a busy engine or router puts several tokens into one event
                for _ in range(num_ready):
                    yield self._output(1)
                num_ready = 0
            if reason is not None:
                self.is_finished = True
                yield self._output(
                    len(self._tokens), reason, choice.get("stop_reason"), choice.get("routed_experts")
                )
            elif num_ready:
                yield self._output(num_ready)

    def _num_ready(self) -> int:
        """Returns how many tokens can't be the one that ends the answer."""
        return len(self._tokens) - (bool(self._tokens) and self._tokens[-1] in self._stops)

    def _output(
        self,
        count: int,
        reason: str | None = None,
        stop_reason: int | str | None = None,
        experts: str | None = None,
    ) -> EngineCoreOutput:
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        rows, self._rows = self._rows[:count], self._rows[count:]
        self.so_far += tokens
        return EngineCoreOutput(
            request_id=self._id,
            new_token_ids=tokens,
            new_logprobs=_logprobs(rows, self._num_logprobs) if self._num_logprobs is not None else None,
            finish_reason=_FINISHES.get(reason, FinishReason.ERROR) if reason is not None else None,
            stop_reason=stop_reason,
            routed_experts=_array(experts) if experts is not None else None,
        )


def _array(text: str) -> Any:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def _logprobs(rows: Sequence[Json], num_alternatives: int) -> LogprobsLists:
    """Returns the log-probabilities of tokens as an engine does: the sampled one first, then the best."""
    ids, values, ranks = [], [], []
    for row in rows:
        sampled = (row["token_id"], row["logprob"])
        tops = [(top["token_id"], top["logprob"]) for top in row.get("top_logprobs") or ()]
        best = _best(sampled, tops, num_alternatives)
        ids.append(np.array([sampled[0], *(token for token, _ in best)]))
        values.append(np.array([sampled[1], *(value for _, value in best)]))
        ranks.append(np.array(1 + sum(value > sampled[1] for _, value in tops)))
    return LogprobsLists(ids, values, ranks)


def _best(
    sampled: tuple[int, float], tops: Sequence[tuple[int, float]], count: int
) -> list[tuple[int, float]]:
    """Returns the `count` best tokens. A worker lists the sampled one ahead of them, or in place of it."""
    others = [top for top in tops if top[0] != sampled[0]]
    if count == 0 or len(others) >= count:
        return others[:count]
    return sorted([sampled, *others], key=lambda top: -top[1])


def error_of(part: Mapping[str, Any]) -> tuple[int, str] | None:
    """Returns the status and message of a streamed error; None if the event is none."""
    error = part.get("error")
    if error is None:
        return None
    is_full = isinstance(error, Mapping)
    code = error.get("code") if is_full else None
    message = str(error.get("message", error)) if is_full else str(error)
    return (code if isinstance(code, int) else 502), message
