"""verl's unmodified agent loops ask a router before a real engine: a single turn, and turns with a tool."""

import json
from typing import Any

import pytest

from rose.scheduler.rollout.http.command import RunningRouter
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.stock_worker import SERVED_MODEL, StockWorker

loops: Any = pytest.importorskip("verl.experimental.agent_loop.agent_loop", reason="verl is not installed")
parsers: Any = pytest.importorskip("verl.experimental.agent_loop.tool_parser")

pytestmark = [pytest.mark.vllm, pytest.mark.clients]

TURN_TOKENS = 6
NUM_TURNS = 3
TEMPLATE = (
    "{% for m in messages %}w3 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w4{% endif %}"
)


@parsers.ToolParser.register("always")
class Always(parsers.ToolParser):  # type: ignore[misc]
    """Takes each answer for a call of the tool: the model is random."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[Any]]:
        call = parsers.FunctionCall(name="count", arguments=json.dumps({"num_tokens": len(responses_ids)}))
        return self.tokenizer.decode(responses_ids), [call]


def count(num_tokens: int) -> str:
    """Says how long an answer was.

    Args:
        num_tokens: Its length in tokens.
    """
    return f"w{20 + num_tokens} w9"


async def play(loop_class: Any, engine: StockWorker, router: RunningRouter, **more: Any) -> Any:
    """Runs one trajectory and returns what verl trains on."""
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer

    from rose.trainers.verl import RouterLLMClient

    turns = {
        "max_user_turns": None,
        "max_assistant_turns": NUM_TURNS,
        "max_parallel_calls": 1,
        "max_tool_response_length": 64,
        "tool_response_truncate_side": "right",
        "format": "always",
    }
    rollout = {
        **{"name": "vllm", "prompt_length": 64, "response_length": 128, "multi_turn": turns},
        **{"full_determinism": False, "custom": {"rose": {"router_url": router.url, "model": SERVED_MODEL}}},
    }
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {}}})
    tokenizer: Any = AutoTokenizer.from_pretrained(engine.model)
    tokenizer.chat_template = TEMPLATE
    loop = loop_class(
        trainer_config=loops.DictConfigWrap(config),
        server_manager=RouterLLMClient(config),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=None,
        data_config=loops.DictConfigWrap(OmegaConf.create({})),
        **more,
    )
    sampling = {"temperature": 0.0, "logprobs": True, "max_tokens": TURN_TOKENS, "ignore_eos": True}
    return await loop.run(sampling, raw_prompt=[{"role": "user", "content": "w9 w10"}])


async def test_the_single_turn_loop_gets_ids_and_logprobs(engine: StockWorker) -> None:
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    async with running_router(engine.url) as router:
        output = await play(SingleTurnAgentLoop, engine, router)
    assert output.response_mask == [1] * TURN_TOKENS
    assert len(output.response_ids) == len(output.response_logprobs) == TURN_TOKENS


async def test_the_tool_loop_keeps_its_tokens_over_its_turns_in_one_session(engine: StockWorker) -> None:
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY as TOOLS
    from verl.tools.function_tool import function_tool

    function_tool("count")(count)
    async with running_router(engine.url) as router:
        output = await play(ToolAgentLoop, engine, router, tools=loops.ToolListWrap([TOOLS["count"]]))
        jobs: Any = router.plane.status()["jobs"]
        num_sessions = len(router.plane.trajectories.sessions)
    assert sum(output.response_mask) == NUM_TURNS * TURN_TOKENS < len(output.response_mask)
    assert len(output.response_ids) == len(output.response_logprobs) == len(output.response_mask)
    assert output.num_turns == 2 * NUM_TURNS
    [job] = jobs.values()
    assert (job["turns"], job["next_turns"]["extended"], num_sessions) == (NUM_TURNS, NUM_TURNS - 1, 1)
