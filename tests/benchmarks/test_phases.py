"""One rollout phase of bench_e2e's real part, at stand-in workers."""

import time

from lib.e2e.real import RealPhase, figures
from lib.load.groups import MAX_TOKENS, PhaseResult, play, samples

from rose.measure.records import RequestRecord
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker


async def test_a_phase_ends_with_its_last_turn_and_says_who_made_its_tokens() -> None:
    turns = samples(num_groups=3, group_size=4, vocab_size=64, seed=1)
    assert len({tuple(turn.prompt) for turn in turns}) == 3
    assert max(turn.num_tokens for turn in turns) <= MAX_TOKENS
    async with ScriptedWorker() as one, ScriptedWorker() as other:
        one.faults.append(Fault(kind="disconnect", after_tokens=4))
        settings = {"turns_per_gpu": 4, "avoid_s": 0.05, "heartbeat_s": 0.05}
        async with running_router(one.url, other.url, **settings) as router:
            start_s = time.monotonic()
            found = await play(router.url, "scripted", turns, start_s, "salt")
    assert (found.num_turns, found.num_failed, found.errors) == (12, 0, [])
    assert set(found.tokens) == {one.id, other.id}
    assert sum(found.tokens.values()) == sum(turn.num_tokens for turn in turns)
    assert 0 < found.p75_s <= found.duration_s


async def test_a_turn_without_an_answer_is_counted() -> None:
    turns = samples(num_groups=1, group_size=3, vocab_size=64, seed=1)
    async with ScriptedWorker() as worker, running_router(worker.url) as router:
        worker.faults.append(Fault(kind="status", status=400))
        found = await play(router.url, "scripted", turns, time.monotonic(), None)
    assert (found.num_failed, len(found.errors)) == (1, 1)


def test_the_figures_are_the_ratio_of_each_round_and_servings_objectives_of_the_phases_alone() -> None:
    alone = [_phase(20.0, ttft_s=0.1), _phase(30.0, ttft_s=0.1)]
    lent = [_phase(10.0, ttft_s=0.29), _phase(20.0, ttft_s=0.31)]
    e2e, kept, met, failed = figures(alone, lent, [0.4, 0.4])
    assert (e2e.value, e2e.spread) == (1.75, (1.5, 2.0))
    assert (met.value, met.spread, met.peers["own alone"]) == (0.5, (0.0, 1.0), 1.0)
    assert kept.value == 1.0, "500 ms"
    assert failed.value == 0.0
    assert {each.kind for each in (e2e, kept, met, failed)} == {"measured"}


def _phase(duration_s: float, ttft_s: float) -> RealPhase:
    rollouts = PhaseResult(
        start_s=5.0,
        end_s=5.0 + duration_s,
        num_turns=8,
        num_failed=0,
        errors=[],
        tokens={"a": 1},
        p75_s=duration_s / 2,
    )
    request = RequestRecord(
        max_tokens=2,
        scheduled_s=5.0,
        token_times_s=[5.0 + ttft_s, 5.0 + ttft_s + 0.01],
        status=200,
        finish_reason="length",
    )
    return RealPhase(rollouts=rollouts, requests=[request], serving_busy=0.2, foreign_cpu_share=0.0)
