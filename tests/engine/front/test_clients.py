"""Unmodified clients that nobody here wrote, at a router with a front before a real engine that is cut."""

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from forked_engines import forks
from front.bench_serve import bench_serve
from front.chats import ADD
from front.running import Setup

from tests.scheduler.rollout.lm_eval_runs import lm_eval_results

pytestmark = [pytest.mark.vllm, pytest.mark.clients]
ADDED = {"a": 1, "b": 22}
NUM_TURNS = 10
CUT_AFTER = 3
SAID_AT_LAST = "\n\nDone, then!"
KEY = "any"


def tools() -> Any:
    return [ADD]


def test_openai_chats_with_tools_and_responses(front: Setup) -> None:
    with openai.OpenAI(base_url=f"{front.router_url}/v1", api_key=KEY) as client:
        front.proxy.arm(CUT_AFTER)
        said = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "[call]"}], tools=tools(), temperature=0.0
        )
        calls: Any = said.choices[0].message.tool_calls
        (call,) = calls
        assert call.type == "function" and json.loads(call.function.arguments) == ADDED
        with client.responses.stream(model="tiny", input="[think]", temperature=0.0) as stream:
            answer = stream.until_done().get_final_response()
        assert answer.status == "completed" and answer.output_text == SAID_AT_LAST


def test_anthropic_messages_with_tools_whole_and_streamed(front: Setup) -> None:
    tool: Any = {"name": "add", "input_schema": ADD["function"]["parameters"]}
    asked: Any = {
        "model": "tiny",
        "max_tokens": 60,
        "tools": [tool],
        "messages": [{"role": "user", "content": "[call]"}],
        "extra_body": {"temperature": 0.0},
    }
    with anthropic.Anthropic(base_url=front.router_url, api_key=KEY) as client:
        counted = client.messages.count_tokens(model="tiny", messages=asked["messages"])
        assert counted.input_tokens == len(("<|user|>", "[call]"))
        whole = client.messages.create(**asked)
        front.proxy.arm(CUT_AFTER)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        blocks: list[Any] = [block for block in message.content if block.type == "tool_use"]
        (block,) = blocks
        assert (message.stop_reason, block.name, block.input) == ("tool_use", "add", ADDED)


def test_litellm_chats_with_tools_whole_and_streamed(front: Setup) -> None:
    litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed (CONTRIBUTING.md)")
    asked = {
        "model": "hosted_vllm/tiny",
        "api_base": f"{front.router_url}/v1",
        "api_key": KEY,
        "messages": [{"role": "user", "content": "[call]"}],
        "tools": tools(),
        "temperature": 0.0,
    }
    whole = litellm.completion(**asked)
    front.proxy.arm(CUT_AFTER)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked)))
    for answer in (whole, streamed):
        choice = answer.choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, json.loads(call.function.arguments)) == ("tool_calls", ADDED)


async def test_an_openai_agent_plays_a_game_of_ten_turns_through_cuts(front: Setup) -> None:
    """The game's tool says what comes next: another call, until the last answer."""
    agents: Any = pytest.importorskip("agents", reason="openai-agents is not installed (CONTRIBUTING.md)")
    agents.set_tracing_disabled(True)
    played: list[tuple[int, int]] = []

    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        played.append((a, b))
        front.proxy.arm(CUT_AFTER)
        return "[call]" if len(played) < NUM_TURNS - 1 else "[think]"

    async with openai.AsyncOpenAI(base_url=f"{front.router_url}/v1", api_key=KEY) as client:
        model = agents.OpenAIChatCompletionsModel("tiny", client)
        settings = agents.ModelSettings(
            temperature=0.0, extra_headers={"X-Rose-Job": "game", "X-Session-ID": "g"}
        )
        agent = agents.Agent(
            "player", model=model, tools=[agents.function_tool(add)], model_settings=settings
        )
        result = await agents.Runner.run(agent, "[call]", max_turns=NUM_TURNS)
    assert played == [(1, 22)] * (NUM_TURNS - 1)
    assert result.final_output == SAID_AT_LAST


async def test_a_langgraph_agent_plays_a_game_of_ten_turns_through_cuts(front: Setup) -> None:
    """The same game; its turns come as streams."""
    prebuilt: Any = pytest.importorskip(
        "langgraph.prebuilt", reason="langgraph is not installed (CONTRIBUTING.md)"
    )
    models: Any = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    played: list[tuple[int, int]] = []

    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        played.append((a, b))
        front.proxy.arm(CUT_AFTER)
        return "[call]" if len(played) < NUM_TURNS - 1 else "[think]"

    model = models.ChatOpenAI(
        model="tiny",
        base_url=f"{front.router_url}/v1",
        api_key=KEY,
        temperature=0.0,
        streaming=True,
        default_headers={"X-Rose-Job": "graph", "X-Session-ID": "l"},
    )
    agent = prebuilt.create_react_agent(model, [add])
    asked = {"messages": [{"role": "user", "content": "[call]"}]}
    result = await agent.ainvoke(asked, {"recursion_limit": 3 * NUM_TURNS})
    assert played == [(1, 22)] * (NUM_TURNS - 1)
    assert result["messages"][-1].content == SAID_AT_LAST


def test_lm_eval_scores_chats_with_stop_strings(front: Setup, tmp_path: Path) -> None:
    front.proxy.arm(CUT_AFTER)
    results = lm_eval_results(
        f"{front.router_url}/v1/chat/completions",
        *("tiny", front.model, tmp_path, {"generated": 4 * [{"asked": "[think]", "answer": SAID_AT_LAST}]}),
    )
    assert results["generated"]["exact_match,none"] == 1.0


def test_vllm_bench_serve_finishes_all_its_requests(front: Setup, tmp_path: Path) -> None:
    argv = [
        *("--backend", "openai-chat", "--base-url", front.router_url, "--endpoint", "/v1/chat/completions"),
        *("--model", "tiny", "--tokenizer", str(front.model), "--dataset-name", "random"),
        *("--random-input-len", "32", "--random-output-len", "16", "--num-prompts", "12"),
        *("--max-concurrency", "4", "--ignore-eos", "--save-result"),
        *("--result-dir", str(tmp_path), "--result-filename", "found.json"),
    ]
    front.proxy.arm(CUT_AFTER)
    with forks(tmp_path / "bench") as fork:
        fork(bench_serve, argv=argv).result()
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (12, 0, 12 * 16)
