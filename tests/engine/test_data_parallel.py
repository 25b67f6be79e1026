"""Two engines of two data-parallel ranks each: the ranks of one index share a pool, memory and compute."""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from probes import NUM_VERSIONS, PROBE_TOKENS, ROLLOUT_TOKENS, SERVING_TOKENS, probes, prompt, wave_prompts
from real_engine import Answer, RealEngine, runtime_dir, until
from references import ModelDirs, StockAnswers
from shared_gpu import HEADROOM_SLABS, NUM_SLABS, SETTINGS, BoardLog, LedgerLog
from tiny_models import SLAB_BYTES, staged_update
from weight_probes import update

from rose.admission.board import BoardWord
from rose.memory.daemon.daemon import start_daemon
from rose.memory.daemon.pool_state import read_state
from rose.memory.ledger.ledger import Ledger
from rose.memory.pool.pool import PoolClient
from rose.memory.pool.wire import Kind
from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

POOLS = ("replicated", "replicated-1")
"""The pool that engines are told, and the one that their second rank has."""
MIN_WAVES = 2
MAX_WAVES = 20
STALL_S = 60.0


class Replicas:
    """The pools and both engines."""

    def __init__(self, folder: Path, models: dict[Role, Path], num_stages: int = 1) -> None:
        """``num_stages``: of the pipeline that each data-parallel rank is."""
        self.folder = folder
        self._num_stages = num_stages
        self._undo = ExitStack()
        self._rl_step = 0
        size = {"num_slabs": NUM_SLABS, "slab_bytes": SLAB_BYTES // num_stages, "num_shards": num_stages}
        try:
            self.pools = [self._start_pool(name, size) for name in POOLS]
            self.engines = {role: self._start(role, model) for role, model in models.items()}
            for engine in self.engines.values():
                engine.wait_ready()
        except BaseException:
            self.close()
            raise

    def _start_pool(self, name: str, size: dict[str, Any]) -> PoolClient:
        runtime = runtime_dir(self.folder)
        daemon = start_daemon(name, headroom_slabs=HEADROOM_SLABS, runtime_dir=runtime, **size)
        self._undo.callback(daemon.stop)
        pool = PoolClient.observe(name, runtime_dir=runtime)
        self._undo.callback(pool.close)
        return pool

    def _start(self, role: Role, model: Path) -> RealEngine:
        sizes = {"data": len(POOLS), "pipeline": self._num_stages}
        flags = ["--dtype", "float32"]
        for kind, size in sizes.items():
            flags += [f"--{kind}-parallel-size", str(size)]
        settings = {**SETTINGS, "pool": POOLS[0], "stall_s": STALL_S, "engine_id": f"replicated-{role}"}
        engine = RealEngine(model, role, self.folder, *flags, **settings)
        self._undo.callback(engine.stop)
        return engine

    def begin_rl_step(self) -> None:
        """Returns once the budgets of both pools count."""
        self._rl_step += 1
        self.engines[Role.ROLLOUT].begin_rl_step(self._rl_step)
        until(
            lambda: all(pool.ledger.policy.rl_step == self._rl_step for pool in self.pools),
            "both ranks began the RL step",
        )

    def wait_for_rollouts(self, sent: Sequence[Future[Answer]]) -> None:
        """Returns once rollouts hold slabs of both pools, or are done."""
        ledgers = [pool.ledger for pool in self.pools]
        until(
            lambda: (
                all(ledger.num_held(Role.ROLLOUT) > HEADROOM_SLABS for ledger in ledgers)
                or all(each.done() for each in sent)
            ),
            "rollouts hold slabs of both pools",
        )

    def close(self) -> None:
        self._undo.close()


@pytest.fixture(scope="module")
def replicas(engines_dir: Path, models: ModelDirs) -> Iterator[Replicas]:
    pair = Replicas(engines_dir, {Role.SERVING: models.serving, Role.ROLLOUT: models.untied[0]})
    yield pair
    pair.close()


@pytest.fixture
def serving(replicas: Replicas) -> RealEngine:
    return replicas.engines[Role.SERVING]


@pytest.fixture
def rollout(replicas: Replicas) -> RealEngine:
    return replicas.engines[Role.ROLLOUT]


def on_each_rank(engine: RealEngine, turn: list[int]) -> list[list[int]]:
    """Asks each rank for the same greedy answer."""
    ranks = range(len(POOLS))
    headers = [{"X-data-parallel-rank": str(rank)} for rank in ranks]
    return [engine.complete(turn, PROBE_TOKENS, headers=header).tokens for header in headers]


def test_all_ranks_answer_as_stock_vllm_while_slabs_and_grants_pass_in_both_pools(
    replicas: Replicas, stock: StockAnswers
) -> None:
    answer_as_stock(replicas, stock)


def answer_as_stock(replicas: Replicas, stock: StockAnswers, num_balanced: int = MIN_WAVES) -> None:
    """Asserts that both engines answer as stock vLLM while slabs and grants pass in both pools. Donors leave
    NaN behind. vLLM balances the first ``num_balanced`` waves over the ranks. Then a rank has all of a wave,
    so that its pool is too small."""
    serving, rollout = replicas.engines[Role.SERVING], replicas.engines[Role.ROLLOUT]
    answers: dict[Role, list[tuple[list[int], Answer]]] = {role: [] for role in Role}
    with ExitStack() as logs:
        ledgers = [logs.enter_context(LedgerLog(pool.ledger)) for pool in replicas.pools]
        boards = [logs.enter_context(BoardLog(pool.board_words)) for pool in replicas.pools]

        def has_seen_enough() -> bool:
            is_shared = all(
                log.has_grown(word) for log in boards for word in (BoardWord.R_STEPS, BoardWord.S_STEPS)
            )
            return is_shared and all(len(log.moved) >= 2 for log in ledgers)

        wave = 0
        while wave < MIN_WAVES or (not has_seen_enough() and wave < MAX_WAVES):
            replicas.begin_rl_step()
            # In time, each rank has all of each wave's prompts.
            prompts = {role: wave_prompts(role, (wave + wave // 2) % MIN_WAVES) for role in Role}
            on: dict[str, Any] = (
                {"headers": {"X-data-parallel-rank": str(wave % 2)}} if wave >= num_balanced else {}
            )
            requests = {Role.ROLLOUT: rollout.start_requests(prompts[Role.ROLLOUT], ROLLOUT_TOKENS, **on)}
            replicas.wait_for_rollouts(requests[Role.ROLLOUT])
            requests[Role.SERVING] = serving.start_requests(prompts[Role.SERVING], SERVING_TOKENS, **on)
            for role, sent in requests.items():
                answers[role] += zip(prompts[role], [each.result() for each in sent], strict=True)
            wave += 1
        assert has_seen_enough(), [log.owners for log in ledgers]
    for pool, log in zip(replicas.pools, boards, strict=True):
        pool.ledger.check_integrity()
        assert log.num_overlaps == 0 or log.has_grown(BoardWord.S_OVERRUNS)
    stock.require_equal(answers)


def test_the_status_and_the_metrics_tell_the_ranks_apart(serving: RealEngine, rollout: RealEngine) -> None:
    for engine in (serving, rollout):
        status = engine.status()
        first, second = status.ranks
        assert (first.engine_id, second.engine_id) == (status.engine_id, f"{status.engine_id}-1")
        assert min(first.generated_tokens, second.generated_tokens) > 0
        assert status.generated_tokens == first.generated_tokens + second.generated_tokens
        assert status.kv_slabs_owned == first.kv_slabs_owned + second.kv_slabs_owned
        assert status.device_weights_bytes == 2 * first.device_weights_bytes
        steps = {
            name: value for name, value in engine.metrics().items() if name.startswith("rose_steps_total")
        }
        assert len(steps) == 2 and min(steps.values()) > 0


def test_new_weights_reach_all_ranks_or_none(
    rollout: RealEngine, models: ModelDirs, stock: StockAnswers
) -> None:
    update(rollout, models.untied[1], 1)
    before = [on_each_rank(rollout, turn) for turn in probes()]
    assert all(first == second for first, second in before)
    good = staged_update(models.untied[NUM_VERSIONS], f"test/{NUM_VERSIONS}")
    refused = rollout.update_weights(good.model_copy(update={"state_hash": "0" * 64}))
    assert refused.status_code == 500 and "weights kept at the old version" in refused.text
    assert [on_each_rank(rollout, turn) for turn in probes()] == before
    update(rollout, models.untied[NUM_VERSIONS], NUM_VERSIONS)
    expected = stock.of("untied")
    for turn in probes():
        assert on_each_rank(rollout, turn) == 2 * [expected[tuple(turn)]["tokens"]]


def test_all_ranks_leave_their_gpus_and_come_back_the_same(replicas: Replicas, rollout: RealEngine) -> None:
    before = [on_each_rank(rollout, turn) for turn in probes()]
    rollout.deactivate()
    assert [pool.ledger.num_held(Role.ROLLOUT) for pool in replicas.pools] == [1, 1]
    assert rollout.status().device_weights_bytes == 0
    rollout.activate()
    assert [on_each_rank(rollout, turn) for turn in probes()] == before


def test_an_engine_that_loses_a_rank_ends_and_leaves_both_pools_to_serving(
    replicas: Replicas, serving: RealEngine, rollout: RealEngine
) -> None:
    replicas.begin_rl_step()  # cuts may have left the ranks next to no memory
    lost = rollout.start_requests([prompt(f"lost-{i}", 300) for i in range(8)], max_tokens=700)
    until(lambda: all(rank.kv_slabs_in_use > 0 for rank in rollout.status().ranks), "both ranks compute")
    kept = serving.start_requests([prompt(f"kept-{i}", 100) for i in range(4)], max_tokens=40)
    os.kill(scheduler_pid(replicas.folder, POOLS[1], Role.ROLLOUT), signal.SIGKILL)
    for pool in replicas.pools:
        ledger = pool.ledger
        until(partial(_has_no_rollouts, ledger), "slabs given back")
        ledger.check_integrity()
    assert all(len(request.result().tokens) == 40 for request in kept)
    assert any(request.exception() is not None for request in lost)
    until(lambda: not rollout.process.is_alive(), "the engine has ended")


def scheduler_pid(folder: Path, pool: str, role: Role) -> int:
    state = read_state(runtime_dir(folder) / f"pool-{pool}.state")
    assert state is not None
    hellos = [member.hello for member in state.members]
    (pid,) = [each.pid for each in hellos if (each.role, each.kind) == (role, Kind.SCHEDULER)]
    return pid


def _has_no_rollouts(ledger: Ledger) -> bool:
    return ledger.num_held(Role.ROLLOUT) + ledger.num_draining == 0
