"""Greedy answers over many moves of slabs whose donors leave NaN behind."""

from concurrent.futures import Future
from functools import partial

import pytest
from probes import ROLLOUT_TOKENS, SERVING_TOKENS, WAVES, wave_prompts
from real_engine import Answer, RealEngine, until
from references import StockAnswers
from shared_gpu import NUM_SLABS, LedgerLog, SharedGpu

from rose.types import Role, StopReason

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_MOVES = 1000
BURST_REQUESTS = 8
"""They want all but a few of the slabs."""


@pytest.fixture
def gpu(late_gpu: SharedGpu) -> SharedGpu:
    """The pair whose engines have steps in flight."""
    return late_gpu


def test_greedy_answers_stay_equal_over_a_thousand_moves(
    gpu: SharedGpu, serving: RealEngine, rollout: RealEngine, stock: StockAnswers
) -> None:
    """Every cycle, a serving burst takes most of rollout's slabs and gives them back. Reclaimed rollouts
    count as far as they came; those that had to wait run on slabs that serving has used."""
    expected = {role: stock.of(str(role)) for role in Role}
    burst = [given for wave in range(WAVES) for given in wave_prompts(Role.SERVING, wave)][:BURST_REQUESTS]
    cycle = num_whole = 0
    with LedgerLog(gpu.ledger) as log:
        while log.num_moves < NUM_MOVES:
            rollouts = wave_prompts(Role.ROLLOUT, cycle % WAVES)
            asked = rollout.start_requests(rollouts, ROLLOUT_TOKENS)
            until(partial(are_many_or_done, rollout, asked), "rollouts use half of the pool")
            served = serving.start_requests(burst, SERVING_TOKENS)
            for given, request in zip(burst, served, strict=True):
                assert request.result().tokens == expected[Role.SERVING][tuple(given)]["tokens"]
            until(lambda: gpu.ledger.serving_reserve_slabs == 0, "serving's recent peak has passed")
            gpu.begin_rl_step()
            for given, request in zip(rollouts, asked, strict=True):
                answer: Answer = request.result()
                num_whole += answer.finish_reason == "length"
                assert answer.finish_reason == "length" or answer.stop_reason in set(StopReason)
                tokens = expected[Role.ROLLOUT][tuple(given)]["tokens"]
                assert answer.tokens == tokens[: len(answer.tokens)], (cycle, log.num_moves)
            cycle += 1
    assert num_whole > 0
    for engine in (serving, rollout):
        assert engine.process.log_path is not None
        assert "late device: async scheduling True" in engine.process.log_path.read_text()
    gpu.ledger.check_integrity()


def are_many_or_done(rollout: RealEngine, asked: list[Future[Answer]]) -> bool:
    """Where the machine is busy, all may have stalled before they are many."""
    return rollout.status().kv_slabs_in_use > NUM_SLABS // 2 or all(one.done() for one in asked)
