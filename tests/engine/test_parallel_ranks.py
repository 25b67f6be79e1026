"""Two engines of two ranks each over one pool of two shards: every slab moves on both ranks, or on none.

The ranks are tensor-parallel, or the stages of a pipeline.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from probes import (
    NUM_VERSIONS,
    PROBE_TOKENS,
    ROLLOUT_TOKENS,
    SERVING_TOKENS,
    probes,
    prompt,
    wave_prompts,
)
from real_engine import Answer, RealEngine, runtime_dir, until
from references import ModelDirs, StockAnswers
from shared_gpu import NUM_SLABS, BoardLog, LedgerLog, SharedGpu
from tiny_models import SLAB_BYTES, staged_update
from weight_probes import probe, update

from rose.admission.board import BoardWord
from rose.memory.daemon.pool_state import read_state
from rose.memory.pool.wire import Kind
from rose.types import GateMode, Role, StopReason

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_RANKS = 2
NUM_WAVES = 2
STALL_S = 60.0
"""Nothing waits for a grant here, and four processes may be slow on a busy machine."""


STAGES: dict[str, dict[Role, str]] = {
    "tensor-parallel": {},
    # Serving's larger stage has as much of a block as a slab holds, and is not the first one.
    "pipeline": {Role.SERVING: "2,4", Role.ROLLOUT: "2,2"},
}
"""The layers of the stages of each engine's pipeline."""


@pytest.fixture(scope="module", params=STAGES)
def ranks(engines_dir: Path, models: ModelDirs, request: pytest.FixtureRequest) -> Iterator[SharedGpu]:
    """Ungated, where a test doesn't say otherwise: only their memory is shared."""
    gpu = SharedGpu(
        engines_dir,
        {Role.SERVING: models.serving, Role.ROLLOUT: models.untied[0]},
        num_ranks=NUM_RANKS,
        stages=STAGES[request.param],
        gate=GateMode.OFF,
        stall_s=STALL_S,
    )
    try:
        gpu.ensure_running()
        yield gpu
    finally:
        gpu.close()


@pytest.fixture
def serving(ranks: SharedGpu) -> RealEngine:
    ranks.settle()
    return ranks.engine(Role.SERVING)


@pytest.fixture
def rollout(ranks: SharedGpu) -> RealEngine:
    ranks.settle()
    return ranks.engine(Role.ROLLOUT)


def test_both_engines_answer_as_stock_vllm_while_slabs_move_between_all_ranks(
    ranks: SharedGpu, serving: RealEngine, rollout: RealEngine, stock: StockAnswers
) -> None:
    """Stock vLLM on one rank: in float32 the ranks' sum changes no greedy token. Donors leave NaN behind."""
    answers: dict[Role, list[tuple[list[int], Answer]]] = {role: [] for role in Role}
    with LedgerLog(ranks.ledger) as log:

        def has_seen_enough() -> bool:
            """How far the two get into each other's way, in one wave, is the machine's to say."""
            return len(log.moved) >= NUM_SLABS // 4

        def is_full() -> bool:
            """Whether rollouts have held half of the pool in this wave. The log sees what is over before a
            status has been asked for."""
            return log.peak[Role.ROLLOUT] > NUM_SLABS // 2

        wave = num_full = 0
        while (num_full < NUM_WAVES or not has_seen_enough()) and wave < 10 * NUM_WAVES:
            prompts = {role: wave_prompts(role, wave % NUM_WAVES) for role in Role}
            log.peak[Role.ROLLOUT] = 0
            requests = {Role.ROLLOUT: rollout.start_requests(prompts[Role.ROLLOUT], ROLLOUT_TOKENS)}
            # On a busy machine rollouts may be done before serving has given them its cached slabs.
            while not (is_full() or all(each.done() for each in requests[Role.ROLLOUT])):
                time.sleep(0.02)
            num_full += is_full()
            requests[Role.SERVING] = serving.start_requests(prompts[Role.SERVING], SERVING_TOKENS)
            for role, sent in requests.items():
                answers[role] += zip(prompts[role], [each.result() for each in sent], strict=True)
            ranks.settle()
            wave += 1
    assert num_full >= NUM_WAVES, f"rollouts filled half of the pool in {num_full} of {wave}: {log.budgets}"
    assert has_seen_enough(), log.owners
    ranks.ledger.check_integrity()
    stock.require_equal(answers)


def test_rollouts_engine_core_and_ranks_give_way_to_servings(
    ranks: SharedGpu, serving: RealEngine, rollout: RealEngine
) -> None:
    for engine in (serving, rollout):
        engine.complete(prompt("gives way", 10), 1)
    servings, rollouts = (
        {psutil.Process(pid).nice() for pid in pids(ranks, role)} for role in (Role.SERVING, Role.ROLLOUT)
    )
    assert len(rollouts) == 1 and max(servings) < min(rollouts)


def test_engines_of_two_ranks_exchange_grants_on_one_board(
    ranks: SharedGpu, serving: RealEngine, rollout: RealEngine, stock: StockAnswers
) -> None:
    for engine in (rollout, serving):  # profiling serving takes the whole pool, and so rollouts' budget
        engine.profile()
    ranks.settle()
    for engine in (rollout, serving):
        engine.set_gate(GateMode.DUAL)
    prompts = {role: wave_prompts(role, 0) for role in Role}
    admitted_before = rollout.status().gate.admitted_steps
    with BoardLog(ranks.observer.board_words) as log:
        requests = rollout.start_requests(prompts[Role.ROLLOUT], ROLLOUT_TOKENS)
        until(lambda: log.has_grown(BoardWord.R_STEPS), "rollouts step on the idle GPU")
        servings = [each.result() for each in serving.start_requests(prompts[Role.SERVING], SERVING_TOKENS)]
        rollouts = [each.result() for each in requests]
    assert log.has_grown(BoardWord.S_STEPS) and rollout.status().gate.admitted_steps > admitted_before
    # Serving doesn't wait for ever for a rollout step that runs past its predicted end, on a busy machine.
    assert log.num_overlaps == 0 or log.has_grown(BoardWord.S_OVERRUNS)
    expected = {role: stock.of(str(role)) for role in Role}
    for given, answer in zip(prompts[Role.SERVING], servings, strict=True):
        assert answer.tokens == expected[Role.SERVING][tuple(given)]["tokens"]
    for given, answer in zip(prompts[Role.ROLLOUT], rollouts, strict=True):
        assert answer.finish_reason == "length" or answer.stop_reason == StopReason.RECLAIMED
        assert answer.tokens == expected[Role.ROLLOUT][tuple(given)]["tokens"][: len(answer.tokens)]


def test_weights_change_on_all_ranks_or_on_none(
    ranks: SharedGpu, rollout: RealEngine, models: ModelDirs, stock: StockAnswers
) -> None:
    update(rollout, models.untied[1], 1)
    before = probe(rollout)
    good = staged_update(models.untied[NUM_VERSIONS], f"test/{NUM_VERSIONS}")
    for _ in range(2):  # an error leaves no rank's answer behind for the next call
        refused = rollout.update_weights(good.model_copy(update={"state_hash": "0" * 64}))
        assert refused.status_code == 500 and "weights kept at the old version" in refused.text
    assert [rollout.complete(turn, PROBE_TOKENS).tokens for turn in probes()] == [each[0] for each in before]
    update(rollout, models.untied[NUM_VERSIONS], NUM_VERSIONS)
    expected = stock.of("untied")
    assert [tokens for tokens, _ in probe(rollout)] == [expected[tuple(turn)]["tokens"] for turn in probes()]


def test_all_ranks_leave_the_gpu_and_come_back_the_same(ranks: SharedGpu, rollout: RealEngine) -> None:
    rollout.deactivate()
    rollout.activate()
    before, status = probe(rollout), rollout.status()
    assert status.device_weights_bytes > 0
    rollout.deactivate()
    assert ranks.ledger.num_held(Role.ROLLOUT) == 1
    idle = rollout.status()
    assert (idle.device_weights_bytes, idle.device_kv_bytes) == (0, SLAB_BYTES)
    # Two interpreters with torch and vLLM in them.
    assert idle.device_fixed_bytes > NUM_RANKS * 100 << 20
    until(lambda: ranks.ledger.num_draining == 0, "unmapped by all ranks")
    rollout.activate()
    assert rollout.status().device_weights_bytes == status.device_weights_bytes
    assert probe(rollout) == before


def test_an_engine_that_loses_a_rank_ends_and_gives_its_slabs_back(
    ranks: SharedGpu, serving: RealEngine, rollout: RealEngine
) -> None:
    lost = rollout.start_requests([prompt(f"lost-{i}", 300) for i in range(8)], max_tokens=700)
    until(lambda: rollout.status().kv_slabs_in_use > NUM_SLABS // 2, "rollouts use half of the pool")
    kept = serving.start_requests([prompt(f"kept-{i}", 100) for i in range(4)], max_tokens=40)
    os.kill(worker_pid(ranks, Role.ROLLOUT, rank=1), signal.SIGKILL)
    until(lambda: all(one.role is not Role.ROLLOUT for one in ranks.ledger.engines().values()), "slot freed")
    assert ranks.ledger.num_held(Role.ROLLOUT) == 0
    assert all(len(request.result().tokens) == 40 for request in kept)
    assert any(request.exception() is not None for request in lost)
    until(
        lambda: ranks.ledger.num_free == NUM_SLABS - ranks.ledger.num_held(Role.SERVING),
        "every slab has an owner",
    )
    ranks.ledger.check_integrity()


def pids(gpu: SharedGpu, role: Role) -> list[int]:
    """Those of an engine's core and ranks."""
    state = read_state(runtime_dir(gpu.folder) / f"pool-{gpu.pool}.state")
    assert state is not None
    found = [member.hello.pid for member in state.members if member.hello.role is role]
    assert len(found) == 1 + NUM_RANKS
    return found


def worker_pid(gpu: SharedGpu, role: Role, rank: int) -> int:
    state = read_state(runtime_dir(gpu.folder) / f"pool-{gpu.pool}.state")
    assert state is not None
    hellos = [member.hello for member in state.members]
    (pid,) = [each.pid for each in hellos if (each.role, each.kind, each.rank) == (role, Kind.WORKER, rank)]
    return pid
