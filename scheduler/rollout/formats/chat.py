"""The shape of /v1/chat/completions, and how a chat that was cut is resumed.

Owns: which chats can be resumed; their continuation, answers and streams.
Promises: the text of a resumed answer is that of an unbroken run, because the worker continues from prompt +
generated tokens and its chat endpoint still makes the text. A chat that can't be resumed is recognized before
its client receives anything, and is forwarded to one worker whole (http/passthrough.py).
Never does: I/O, render messages, parse text.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rose.errors import RoseError
from rose.scheduler.rollout.formats import resume
from rose.scheduler.rollout.formats.bodies import Json, TokenIds, encode
from rose.scheduler.rollout.formats.completions import (
    CheckRoom,
    ClientCall,
    Single,
    checked_n,
    child_body,
    usage_of,
)
from rose.scheduler.rollout.formats.events import CHAT_PATH, Chunk
from rose.scheduler.rollout.formats.resume import Accumulated

_RENDERING = frozenset(
    (
        "messages",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
        "add_special_tokens",
    )
)
"""Fields that only affect the prompt, whose ids a continuation is given."""
_SAMPLING = frozenset(
    (
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "seed",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "bad_words",
        "repetition_detection",
        "logit_bias",
        "allowed_token_ids",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "top_logprobs",
    )
)
_ANSWERING = frozenset(
    (
        "model",
        "stream",
        "stream_options",
        "stream_interval",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "include_reasoning",
        "parallel_tool_calls",
        "request_id",
        "session_id",
        "cache_salt",
        "priority",
        "user",
    )
)
_KEPT = _RENDERING | _SAMPLING | _ANSWERING
"""Fields that mean the same to a continuation. A chat with any other field goes to one worker whole: a cut
loses the state of tools, stop strings and structured output, and the ids don't hold images."""
_SAYS_NOTHING: tuple[object, ...] = ("none", {"type": "text"})
"""Values of tool_choice and response_format that change nothing."""


class ChatParsed(RoseError):
    """A parser in the worker makes the text (reasoning, tools), so only a whole answer of one worker is
    right."""


def can_resume(body: Mapping[str, Any]) -> bool:
    """Returns whether a cut answer to this chat can be resumed on another worker, as far as the request
    tells.

    The request has to limit its length, because the router can't know a worker's default.
    """
    limit = _limit(body)
    return (
        all(name in _KEPT or not value or value in _SAYS_NOTHING for name, value in body.items())
        and type(limit) is int
        and limit > 0
        and body.get("add_generation_prompt") is not False  # otherwise the role is that of the last message
        and _is_plain(body.get("stream_options"))
        and _are_texts(body.get("messages"))
    )


_NOT_FOR_FRONTS = (
    *("use_beam_search", "echo", "kv_transfer_params", "ec_transfer_params", "thinking_token_budget"),
    *("logprob_token_ids", "mm_processor_kwargs"),
)


def suits_front(body: Mapping[str, Any]) -> bool:
    """Returns whether a front can answer a chat that can't be resumed here: it takes text alone."""
    is_plain = not any(body.get(name) for name in _NOT_FOR_FRONTS) and body.get("prompt_logprobs") is None
    return is_plain and _are_texts(body.get("messages"))


def must_follow_grammar(body: Mapping[str, Any]) -> bool:
    """Returns whether an answer is bound to a grammar: by the request's own, or by a tool that it has to
    call."""
    return body.get("tool_choice") not in (None, "none", "auto") or resume.has_grammar(body)


def _limit(body: Mapping[str, Any]) -> object:
    newer = body.get("max_completion_tokens")
    return newer if newer is not None else body.get("max_tokens")


def _is_plain(stream_options: object) -> bool:
    """Whether only the last event may hold the usage."""
    if not isinstance(stream_options, dict):
        return stream_options is None
    return not stream_options.get("continuous_usage_stats")


def _are_texts(messages: object) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, dict) and all(part.get("type") == "text" for part in _parts(message))
        for message in messages
    )


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part if isinstance(part, dict) else {} for part in content]


def transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns a text such that the next turn's text begins with it, followed by the answer."""
    said = [f"{_line(message)}\0" for message in messages]
    return "".join([*said, "assistant\0"])


def _line(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        content = "".join(str(part.get("text")) for part in _parts(message))
    calls = message.get("tool_calls")
    return f"{message.get('role')}\0{content}" + (encode(calls).decode() if calls else "")


@dataclass(slots=True)
class ChatGeneration(Accumulated):
    """One choice of a chat over all its attempts."""

    path: ClassVar[str] = CHAT_PATH
    is_streamed: bool = False
    role: str = "assistant"
    is_parsed: bool = False

    @property
    def must_restart(self) -> bool:
        return self.is_parsed or self.prompt_token_ids is None

    def _take_context(self, chunk: Chunk) -> None:
        """Raises: ChatParsed; ValueError if the worker did not continue from the ids that it was given."""
        if chunk.role is not None:
            self.role = chunk.role
        if chunk.is_parsed and not self.is_parsed:
            if not (self.is_streamed and self.token_ids):
                raise ChatParsed("the worker parses this model's chats, so they can't be resumed")
            self.is_parsed = True  # the client has a part already, and only a cut would need a restart
        if chunk.prompt_token_ids is None:
            return
        if not self.token_ids:
            self.prompt_token_ids = chunk.prompt_token_ids
        elif chunk.prompt_token_ids.listed() != self.so_far().listed():
            self.prompt_token_ids = None  # this forces a restart
            raise ValueError("the worker used the messages instead of the token ids, as vLLM before 0.32 may")

    def _continued(self, ids: TokenIds) -> Json:
        """Gives vLLM the ids as a prefiller would, so that it renders no messages."""
        return {"kv_transfer_params": {"prompt_token_ids": ids}}

    def _add_logprobs(self, logprobs: Mapping[str, Any]) -> None:
        if self.logprobs is None:
            self.logprobs = {"content": []}
        self.logprobs["content"].extend(logprobs["content"])

    def merged_logprobs(self) -> Json | None:
        return self.logprobs


class Chat:
    """OpenAI's /v1/chat/completions as vLLM has it. See shape.Format."""

    ids_key = "prompt"  # a chat has none
    end = b"data: [DONE]\n\n"

    def call(self, body: Json, check_room: CheckRoom | None) -> ClientCall:
        """Reads a request for which `can_resume` holds."""
        limited = {**body, "max_tokens": _limit(body)}
        limited.pop("max_completion_tokens", None)
        n, call_id = checked_n(limited), uuid.uuid4().hex
        if check_room is not None:
            check_room(n)
        prompt, is_streamed = transcript(body["messages"]), bool(body.get("stream"))
        singles = []
        for index in range(n):
            request = {**child_body(limited, index), "request_id": f"{call_id}-{index}"}
            generation = ChatGeneration(request=request, is_streamed=is_streamed)
            singles.append(Single(index=index, prompt=prompt, generation=generation))
        return ClientCall(body=body, n=n, singles=singles, is_batch=n > 1, id=f"chatcmpl-{call_id}")

    def answer(self, call: ClientCall, model: str | None) -> Json:
        returns_ids = bool(call.body.get("return_token_ids"))
        choices = [_choice(single, returns_ids) for single in call.singles]
        ids = call.singles[0].generation.prompt_token_ids if returns_ids else None
        usage = {"usage": usage_of(call), "prompt_token_ids": ids}
        return {**_envelope(call, "chat.completion", model), "choices": choices, **usage}

    def stream_chunk(self, call: ClientCall, single: Single, chunk: Chunk, model: str | None) -> Json:
        is_first = single.generation.num_tokens == len(chunk.token_ids)
        role = {"role": _role(single)} if is_first else {}
        choice: Json = {"index": single.index, "delta": {**role, "content": chunk.text}}
        choice |= {"logprobs": chunk.logprobs, "finish_reason": None}
        event = {**_envelope(call, "chat.completion.chunk", model), "choices": [choice]}
        if call.body.get("return_token_ids"):
            choice["token_ids"] = list(chunk.token_ids)
            if is_first:
                event["prompt_token_ids"] = single.generation.prompt_token_ids
        return event

    def stream_end(self, call: ClientCall, single: Single, model: str | None) -> Json:
        generation = single.generation
        choice: Json = {"index": single.index, "delta": {}, "logprobs": None}
        choice |= {"finish_reason": generation.finish_reason, "stop_reason": generation.stop_reason}
        choice["rose"] = generation.provenance()
        return {**_envelope(call, "chat.completion.chunk", model), "choices": [choice]}

    def stream_usage(self, call: ClientCall, model: str | None) -> Json | None:
        if not call.wants_usage:
            return None
        return {**_envelope(call, "chat.completion.chunk", model), "choices": [], "usage": usage_of(call)}


def _envelope(call: ClientCall, kind: str, model: str | None) -> Json:
    return {"id": call.id, "object": kind, "created": call.created, "model": model}


def _role(single: Single) -> str:
    generation = single.generation
    assert isinstance(generation, ChatGeneration)
    return generation.role


def _choice(single: Single, returns_ids: bool) -> Json:
    generation = single.generation
    return {
        "index": single.index,
        "message": {"role": _role(single), "content": generation.text},
        "logprobs": generation.merged_logprobs(),
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
        "token_ids": generation.token_ids if returns_ids else None,
        "rose": generation.provenance(),
    }
