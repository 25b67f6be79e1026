"""`rose node` with two data-parallel ranks of each engine, which answer as stock vLLM from both pools."""

import signal
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import engine_runs
import httpx
import pytest
import yaml
from forked_engines import forks
from probes import ROLLOUT_TOKENS, SERVING_TOKENS, wave_prompts
from tiny_models import MAX_MODEL_LEN, SLAB_BYTES, make_rollout_model, make_serving_model

from rose.memory.pool.pool import PoolClient
from rose.node.control import completion_body
from rose.ports import free_port
from rose.types import Role
from tests.node.homes import END_TIMEOUT_S, READY_TIMEOUT_S, Home, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

POOLS = ("replicas", "replicas-1")
NUM_SLABS, HEADROOM_SLABS = 24, 6
MAX_WAVES = 10
TOKENS = {Role.SERVING: SERVING_TOKENS, Role.ROLLOUT: ROLLOUT_TOKENS}
SETTINGS = {"slo_ttft_ms": 8000.0, "slo_tpot_ms": 2000.0, "serving_window_s": 0.5, "stall_s": 60.0}
"""The SLOs are loose, so that rollouts get grants on busy cores."""
VLLM_ARGS = [
    *("--served-model-name", "tiny", "--enforce-eager", "--dtype", "float32", "--data-parallel-size", "2"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "12"),
]


class Node:
    """A node of a serving and a rollout engine, and the requests to them."""

    def __init__(self, home: Home, models: dict[Role, Path], undo: ExitStack) -> None:
        self.home = home
        self._undo = undo
        ports = {Role.SERVING: home.port, Role.ROLLOUT: free_port()}
        self.names = [f"{role}-{port}" for role, port in ports.items()]
        self._http = {role: self._client(port) for role, port in ports.items()}
        self._threads = undo.enter_context(ThreadPoolExecutor(64))
        engines = [
            {
                **{"model": str(models[role]), "role": str(role), "port": port, "vllm_args": VLLM_ARGS},
                **{**SETTINGS, "poison_slabs": True},
            }
            for role, port in ports.items()
        ]
        pool = {
            **{"name": POOLS[0], "num_slabs": NUM_SLABS},
            **{"slab_bytes": SLAB_BYTES, "headroom_slabs": HEADROOM_SLABS},
        }
        path = home.folder / "NODE.yaml"
        path.write_text(yaml.safe_dump({"pool": pool, "engines": engines}))
        home.start("node", str(path))

    def _client(self, port: int) -> httpx.Client:
        limits = httpx.Limits(max_keepalive_connections=0)
        url = f"http://127.0.0.1:{port}"
        return self._undo.enter_context(
            httpx.Client(base_url=url, timeout=READY_TIMEOUT_S, limits=limits, trust_env=False)
        )

    def is_ready(self) -> bool:
        log = self.home.log("node")
        return all(f"ready name={name}" in log for name in self.names)

    def observe(self) -> list[PoolClient]:
        pools = [PoolClient.observe(name, runtime_dir=self.home.runtime_dir) for name in POOLS]
        for pool in pools:
            self._undo.callback(pool.close)
        return pools

    def begin_rl_step(self, step: int) -> None:
        self._http[Role.ROLLOUT].post("/rose/v1/rl_step", json={"step": step}).raise_for_status()

    def ask(self, role: Role, rank: int, prompts: Sequence[Sequence[int]]) -> "list[Future[list[int]]]":
        return [self._threads.submit(self._complete, role, rank, prompt) for prompt in prompts]

    def _complete(self, role: Role, rank: int, prompt: Sequence[int]) -> list[int]:
        answer = self._http[role].post(
            "/v1/completions",
            json=completion_body("tiny", list(prompt), TOKENS[role]),
            headers={"X-data-parallel-rank": str(rank)},
        )
        tokens: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
        return tokens


def num_moves(pool: PoolClient) -> int:
    return sum(pool.ledger.entry(slab).epoch for slab in range(NUM_SLABS))


def test_both_ranks_of_both_engines_answer_as_stock_vllm_while_slabs_move_in_both_pools(
    tmp_path: Path,
) -> None:
    """Slabs that leave are poisoned. The node ends with SIGTERM, and nothing of it stays."""
    models = {
        Role.SERVING: make_serving_model(tmp_path / "serving"),
        Role.ROLLOUT: make_rollout_model(tmp_path / "rollout"),
    }
    prompts = {role: wave_prompts(role, 0) for role in models}
    with ExitStack() as undo:
        home = Home(tmp_path, models[Role.SERVING], undo)
        node = Node(home, models, undo)
        fork = undo.enter_context(forks(tmp_path / "stock"))
        references = {
            role: fork(engine_runs.stock_answers, model=model, prompts=prompts[role], max_tokens=TOKENS[role])
            for role, model in models.items()
        }
        home.processes["node"].wait_until(node.is_ready, "engines", READY_TIMEOUT_S)
        expected = {role: one.result() for role, one in references.items()}
        pools = node.observe()
        before, wave = [num_moves(pool) for pool in pools], 0
        while min(num_moves(pool) - old for pool, old in zip(pools, before, strict=True)) < NUM_SLABS:
            assert wave < MAX_WAVES, [num_moves(pool) for pool in pools]
            node.begin_rl_step(wave + 1)
            sent = {
                (role, rank): node.ask(role, rank, prompts[role])
                for role in (Role.ROLLOUT, Role.SERVING)
                for rank in range(2)
            }
            for (role, _), requests in sent.items():
                for request, tokens in zip(requests, expected[role], strict=True):
                    answer = request.result()
                    assert answer == (tokens if role is Role.SERVING else tokens[: len(answer)])
            wave += 1
        home.processes["node"].send_signal(signal.SIGTERM)
        assert home.processes["node"].wait(END_TIMEOUT_S) == 0
        wait_until(lambda: home.running("node") == [])
        assert not any(home.has_pool(name) for name in POOLS)
        assert home.status_pages() == []
