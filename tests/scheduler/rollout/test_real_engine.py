"""The router in front of one real vLLM engine on the CPU."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from forked_server import ForkedServer

from rose.node.checks import free_port
from rose.node.processes import ServerProcess
from rose.scheduler.rollout.config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.service import RunningRouter
from tests.scheduler.rollout.tiny_model import make_tiny_qwen3
from tests.scheduler.rollout.waiting import until

pytestmark = pytest.mark.vllm

_START_S = 180.0
_ENGINE_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("engine")
    url = f"http://127.0.0.1:{(port := free_port())}"
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(make_tiny_qwen3(folder)), "--port", str(port), "--served-model-name", "tiny"),
        *("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"),
    ]
    with ForkedServer(ServerProcess(argv, "engine", folder / "engine.log", _ENGINE_ENVIRONMENT)) as engine:
        engine.wait_ready(f"{url}/health", _START_S)
        yield url


def config_for(engine_url: str) -> RouterConfig:
    return RouterConfig(
        port=0, workers=(WorkerSpec(url=engine_url),), stall_s=30, first_token_s=120, lost_after_s=30
    )


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(url, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


def without_rose(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v for k, v in choice.items() if k != "rose"} for choice in answer["choices"]]


TOP_1 = {"temperature": 1.0, "top_k": 1}
"""Greedy in effect; vLLM refuses n > 1 at temperature 0."""

BODIES = [
    {"prompt": [5, 6, 7], "max_tokens": 20, "return_token_ids": True, "logprobs": 1},
    {"prompt": [5, 6, 7], "max_tokens": 20, "logprobs": 0, "return_tokens_as_token_ids": True},
    {"prompt": "w5 w6 w7", "max_tokens": 12, "return_token_ids": True},
    {"prompt": ["w5 w6", "w9"], "max_tokens": 6, "n": 2, "logprobs": 3, "return_token_ids": True, **TOP_1},
    {"prompt": [[5, 6], [9, 8, 7]], "max_tokens": 5, "ignore_eos": True},
    {"prompt": [5, 6, 7], "max_tokens": 9, "prompt_logprobs": 1},
]


@pytest.mark.asyncio
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
async def test_greedy_answers_equal_those_of_the_engine_itself(engine_url: str, body: dict[str, Any]) -> None:
    body = {"model": "tiny", "temperature": 0.0, **body}
    async with RunningRouter(config_for(engine_url)) as router, aiohttp.ClientSession() as http:
        await until(lambda: all(w.is_alive for w in router.plane.registry.workers()))
        direct = await post(http, f"{engine_url}/v1/completions", body)
        routed = await post(http, f"{router.url}/v1/completions", body)
    assert without_rose(routed) == direct["choices"]
    assert routed["model"] == "tiny"
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [routed["usage"][k] for k in counts] == [direct["usage"][k] for k in counts]


@pytest.mark.asyncio
async def test_a_resumed_greedy_turn_equals_the_unsplit_one(engine_url: str) -> None:
    """The attempt is cut from outside after some tokens; the engine continues from prompt + generated."""
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 200,
        "temperature": 0.0,
        "return_token_ids": True,
        "logprobs": 0,
    }
    body |= {"ignore_eos": True, "stream_interval": 1}
    async with RunningRouter(config_for(engine_url)) as router, aiohttp.ClientSession() as http:
        worker = router.plane.registry.workers()[0]
        await until(lambda: worker.is_alive)
        direct = await post(http, f"{engine_url}/v1/completions", body)
        turn = asyncio.create_task(post(http, f"{router.url}/v1/completions", body))
        await until(lambda: worker.num_tokens >= 20)
        worker.lost("cut by the test")
        choice = (await turn)["choices"][0]
    assert choice["token_ids"] == direct["choices"][0]["token_ids"]
    assert choice["text"] == direct["choices"][0]["text"]
    assert choice["rose"]["resumes"] == 1


@pytest.mark.asyncio
async def test_an_error_of_the_engine_reaches_the_client_unchanged(engine_url: str) -> None:
    body = {"prompt": [5], "max_tokens": 5000}
    async with RunningRouter(config_for(engine_url)) as router, aiohttp.ClientSession() as http:
        await until(lambda: all(w.is_alive for w in router.plane.registry.workers()))
        async with http.post(f"{router.url}/v1/completions", json=body) as response:
            assert response.status == 400
            assert "max_tokens" in (await response.json())["error"]["message"]


@pytest.mark.asyncio
async def test_trls_own_client_works_through_the_router(engine_url: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    async with RunningRouter(config_for(engine_url)) as router:
        await until(lambda: all(w.is_alive for w in router.plane.registry.workers()))
        routed, direct = await run_trl_client([router.url, engine_url], tmp_path)
    assert routed == direct
    assert routed["generate"]["prompt_ids"] == [[5, 6, 7], [8, 9, 10, 11]]
    assert len(routed["generate"]["completion_ids"]) == 4


async def run_trl_client(urls: list[str], folder: Path) -> list[dict[str, Any]]:
    """TRL's client in a process of its own. It asks for a distribution named vllm, which vllm-cpu is not."""
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    try:
        version("vllm")
    except PackageNotFoundError:
        info = folder / "vllm-0.32.0+cpu.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        paths.append(str(folder))
    environment = {**os.environ, **_ENGINE_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.scheduler.rollout.trl_client",
        *urls,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    answer: list[dict[str, Any]] = json.loads(output.decode().splitlines()[-1])
    return answer
