"""Chats of several kinds, and what an answer says, however it is sent."""

import json
from collections.abc import Sequence
from typing import Any

import httpx

Json = dict[str, Any]
ADD: Json = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"is_good": {"type": "boolean"}, "kind": {"enum": ["apple", "pear"]}},
    "required": ["is_good", "kind"],
    "additionalProperties": False,
}
GREEDY_TWINS = {"temperature": 1.0, "top_k": 1, "n": 2}
"""vLLM refuses n above 1 at temperature 0."""


def _thinks(word: str, **more: Any) -> Json:
    return {"messages": [{"role": "user", "content": word}], "temperature": 0.0, **more}


def _asks(word: str, **more: Any) -> Json:
    """The same without reasoning: a grammar then begins with the answer."""
    return _thinks(word, chat_template_kwargs={"enable_thinking": False}, **more)


def _calls(word: str) -> dict[str, Json]:
    named = {"type": "function", "function": {"name": "add"}}
    return {
        "tools auto": _asks(word, tools=[ADD], tool_choice="auto"),
        "tools required": _asks(word, tools=[ADD], tool_choice="required", max_tokens=60),
        "tool named": _asks(word, tools=[ADD], tool_choice=named, max_tokens=60),
    }


_OFTEN: Json = {"logit_bias": {"65": 28.0}}
"""A token that wins until it has been said a few times."""
_ALWAYS: Json = {"logit_bias": {"65": 100.0}}
_CALLED = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": SCHEMA}}
CHATS: dict[str, Json] = {
    "plain": _asks("[plain]"),
    "reasoning": _thinks("[think]"),
    **_calls("[call]"),
    "penalties": _asks("[count]", presence_penalty=1.0, frequency_penalty=0.5, max_tokens=24, **_OFTEN),
    "bad words": _asks("[count]", bad_words=[" four five"], max_tokens=24),
    "repetition": _asks(
        "[count]", repetition_detection={"max_pattern_size": 1, "min_count": 6}, max_tokens=24, **_ALWAYS
    ),
    "schema": _asks("[count]", response_format=_FORMAT, max_tokens=60),
    "regex": _asks("[count]", structured_outputs={"regex": "[a-f]{6}-[0-9]{4}"}, max_tokens=60),
    "reasoning, then regex": _thinks("[think]", structured_outputs={"regex": "[a-f]{6}"}, max_tokens=60),
    "stop strings": _asks("[count]", stop=["ve si", "never"], include_stop_str_in_output=True),
    "logprobs": _asks("[count]", logprobs=True, top_logprobs=2),
    "n": _asks("[count]", **GREEDY_TWINS),
    "limits": _asks("[count]", max_tokens=14, min_tokens=13, logit_bias={"65": 1.5}),
    "ids": _asks("[count]", return_token_ids=True, stop_token_ids=[66]),
    "tool result": {
        "messages": [
            {"role": "system", "content": "You add."},
            {"role": "user", "content": "[call]"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "type": "function", "function": _CALLED}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "[think]"},
        ],
        "tools": [ADD],
        "temperature": 0.0,
    },
}

OTHERS_CHATS = {
    "llama3_json/qwen3": _calls("[json]"),
    "pythonic/qwen3": _calls("[python]"),
    "hermes/deepseek_r1": {"reasoning": _thinks("[think]")},
    "hermes/granite": {"reasoning": _thinks("[granite]")},
}
"""Chats by other tool and reasoning parsers than the engine's flags name. The model says what each reads."""


def whole(url: str, body: Json, **headers: str) -> list[Json]:
    """Asks for a whole answer; returns what each choice says."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=_named(body), headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    said = [_said({**choice, **choice.pop("message")}) for choice in found["choices"]]
    return [*said, {"usage": _counts(found["usage"]), "prompt": found.get("prompt_token_ids")}]


def streamed(url: str, body: Json, **headers: str) -> list[Json]:
    """The same of a streamed answer."""
    settings = {"stream": True, "stream_options": {"include_usage": True}}
    asked = {**_named(body), **settings}
    request: Any = {"json": asked, "headers": headers, "timeout": 300}
    with httpx.stream("POST", f"{url}/v1/chat/completions", **request) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    assert not any("error" in event for event in events), events[-1]
    prompts = [event["prompt_token_ids"] for event in events if event.get("prompt_token_ids")]
    choices = [choice for event in events for choice in event["choices"]]
    indexes = sorted({choice["index"] for choice in choices})
    said = [_said(_joined([choice for choice in choices if choice["index"] == index])) for index in indexes]
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    return [*said, {"usage": _counts(usage), "prompt": prompts[0] if prompts else None}]


def _named(body: Json) -> Json:
    return {"model": "tiny", **body}


def _counts(usage: Json) -> Json:
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def _joined(parts: Sequence[Json]) -> Json:
    """What the deltas of one choice add up to."""
    joined: Json = {"role": "", "content": "", "reasoning": "", "token_ids": [], "logprobs": {"content": []}}
    calls: dict[int, Json] = {}
    for part in parts:
        delta = part["delta"]
        for name in ("role", "content", "reasoning"):
            joined[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            for name in known:
                known[name] += call["function"].get(name) or ""
        joined["token_ids"] += part.get("token_ids") or ()
        joined["logprobs"]["content"] += (part.get("logprobs") or {}).get("content") or ()
        for name in ("finish_reason", "stop_reason"):
            joined[name] = part.get(name) if part.get(name) is not None else joined.get(name)
    joined["tool_calls"] = [{"function": call} for _, call in sorted(calls.items())]
    return joined


def _said(choice: Json) -> Json:
    """What a choice says, without the ids that are drawn at random."""
    functions = [call["function"] for call in choice.get("tool_calls") or ()]
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    reasoning = choice.get("reasoning")
    return {
        "role": choice["role"],
        "content": choice.get("content") or "",
        "reasoning": (reasoning if reasoning is not None else choice.get("reasoning_content")) or "",
        "tool_calls": [(function["name"], function["arguments"]) for function in functions],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
        "token_ids": choice.get("token_ids") or [],
        "logprobs": [
            (each["token"], each["logprob"], [(top["token"], top["logprob"]) for top in each["top_logprobs"]])
            for each in logprobs
        ],
    }
