"""Agents with tools, for bench_agents.py: conversations whose every answer is known.

Owns the agents' questions and what an answer says. Promises that the next question holds the answer before
it, as a real agent's does, and what its tools said: some hundreds of tokens each. Never disturbs an engine.
"""

import asyncio
import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Json = dict[str, Any]
_EVENT = b"data: {"
CHAT_PATH = "/v1/chat/completions"
NUM_TURNS = 10
LONG = 240
"""Characters that a grammar wants: tokens enough to be cut among."""
OUTPUT_TOKENS = (150, 600)
"""The least and the most that a tool's output has, or a user's question."""
CONTEXT_TOKENS = 12288
"""The longest conversation fits into this."""
_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": _PARAMETERS}}
_NOTE = {"type": "string", "pattern": f"^[a-z]{{{LONG}}}$"}
_SCHEMA = {
    "type": "object",
    "properties": {"note": _NOTE},
    "required": ["note"],
    "additionalProperties": False,
}
KINDS: tuple[tuple[str, Json], ...] = (
    ("[call]", {"tools": [TOOL], "tool_choice": "auto"}),
    ("[think]", {"tools": [TOOL]}),
    ("[count]", {"structured_outputs": {"regex": f"[a-f]{{{LONG}}}-[0-9]{{4}}"}, "max_tokens": 2 * LONG}),
    ("[call]", {"tools": [TOOL], "tool_choice": "required", "max_tokens": LONG}),
    ("[plain]", {"stop": ["never said"], "logprobs": True}),
    ("[count]", {"frequency_penalty": 0.5, "logit_bias": {"65": 28.0}, "max_tokens": LONG // 2}),
    (
        "[count]",
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": _SCHEMA}},
            "max_tokens": 3 * LONG,
        },
    ),
)


@dataclass(slots=True)
class AgentTurn:
    """One turn of an agent."""

    body: Json
    said: Json | None = None
    error: str | None = None


@dataclass(slots=True)
class Agent:
    """One conversation after the other, each of NUM_TURNS turns."""

    name: str
    is_streaming: bool = False
    turns: list[AgentTurn] = field(default_factory=list)

    async def play(self, http: aiohttp.ClientSession, url: str, model: str, is_over: asyncio.Event) -> None:
        """Asks until it is told to stop; the turn under way is ended."""
        number, by_chance = 0, random.Random(self.name)
        while not is_over.is_set():
            messages: list[Json] = [{"role": "system", "content": f"You are {self.name}, {number}."}]
            calls: Sequence[tuple[str, str]] = ()
            for turn in range(NUM_TURNS):
                if is_over.is_set():
                    return
                word, more = KINDS[(number + turn) % len(KINDS)]
                messages = [*messages, *_next_messages(calls, f"{_output(by_chance)} {word}")]
                asked = AgentTurn({"model": model, "messages": messages, "temperature": 0.0, **more})
                self.turns.append(asked)
                headers = {"X-Session-ID": f"{self.name}-{number}", "X-Rose-Job": "agents"}
                await ask(http, url, asked, headers, is_streamed=self.is_streaming)
                if asked.said is None:
                    break  # an agent that got no answer begins anew
                calls = _whole_calls(asked.said)
                messages = [*messages, _answer(asked.said)]
            number += 1


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    asked: AgentTurn,
    headers: dict[str, str],
    *,
    is_streamed: bool = False,
) -> None:
    """Sends a turn and notes what was said, or why nothing was."""
    body = {**asked.body, "stream": is_streamed}
    try:
        async with http.post(f"{url}{CHAT_PATH}", json=body, headers=headers) as response:
            if response.status != 200:
                asked.error = f"{response.status} {await response.text()}"
            elif is_streamed:
                asked.said = said(await _joined(response.content))
            else:
                asked.said = said((await response.json())["choices"][0])
    except (aiohttp.ClientError, ValueError) as error:
        asked.error = f"{type(error).__name__}: {error}"


async def _joined(lines: aiohttp.StreamReader) -> Json:
    """Returns the choice that the events of a stream add up to.

    Raises: ValueError for an error event, and for a stream that ends without a finish.
    """
    calls: list[Json] = []
    message: Json = {"content": "", "reasoning": "", "tool_calls": calls}
    choice: Json = {"message": message, "finish_reason": None}
    async for line in lines:
        if not line.startswith(_EVENT):
            continue
        event = json.loads(line.removeprefix(_EVENT[:-1]))
        if "error" in event:
            raise ValueError(event["error"])
        for part in event["choices"]:
            delta = part["delta"]
            for name in ("content", "reasoning"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(calls):
                    calls.append({"function": {"name": "", "arguments": ""}})
                for name, text in call["function"].items():
                    calls[call["index"]]["function"][name] += text or ""
            choice |= {name: part[name] for name in ("finish_reason", "stop_reason") if part.get(name)}
    if choice["finish_reason"] is None:
        raise ValueError("the stream ended without a finish")
    return choice


def said(choice: Json) -> Json:
    """Returns what a choice says, without ids that are drawn at random."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning") or "",
        "tool_calls": [(call["name"], call["arguments"]) for call in calls],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
    }


def _answer(said_before: Json) -> Json:
    """Returns an answer as the next question holds it: a call without its end can't be in a history."""
    calls = [
        {"id": f"call-{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(_whole_calls(said_before))
    ]
    message: Json = {"role": "assistant", "content": said_before["content"]}
    return {**message, "tool_calls": calls} if calls else message


def _whole_calls(said_before: Json) -> list[tuple[str, str]]:
    is_whole = said_before["finish_reason"] != "length"
    return list(said_before["tool_calls"]) if is_whole else []


def _next_messages(calls: Sequence[tuple[str, str]], text: str) -> list[Json]:
    """Returns what comes after an answer: the output of each tool that it called, else the user's words."""
    if not calls:
        return [{"role": "user", "content": text}]
    return [{"role": "tool", "tool_call_id": f"call-{at}", "content": text} for at in range(len(calls))]


def _output(by_chance: random.Random) -> str:
    """Returns a text of which each letter is a token."""
    return "".join(by_chance.choices(string.ascii_lowercase, k=by_chance.randint(*OUTPUT_TOKENS)))
