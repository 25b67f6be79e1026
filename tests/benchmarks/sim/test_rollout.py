"""The simulator: its engine's arithmetic, and that phases end with everything accounted for."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest
from sim.rollout.engine import RunningTurn, SimulatedEngine
from sim.rollout.loop import RolloutSimulation, simulate
from sim.rollout.scenario import QWEN3_8B, ServingShare, TrajectoryStep, busy_fractions, trajectories

from rose.scheduler.rollout.placing.views import Speed, TurnView
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.turn.accounts import JobAccounts
from rose.scheduler.rollout.turn.dataplane import POLICIES
from rose.scheduler.rollout.turn.place import Place
from rose.scheduler.rollout.workers.worker import Worker

SMALL = replace(
    QWEN3_8B,
    num_dedicated=2,
    num_serving=2,
    num_trajectories=32,
    chunk_tokens=100,
    speed=Speed(prefill_s_per_token=1e-4, step_s=0.02, step_s_per_turn=0.005),
)


def run(missing_tokens: float, generated_tokens: int) -> RunningTurn:
    config = RouterConfig()
    worker = Worker(WorkerSpec(url="http://w:1"), config)
    job = JobAccounts(config).get("job", 0.0)
    place = Place(worker, TurnView(session="t"), job, 0.0, missing_tokens, 0.0)
    return RunningTurn(
        0, TrajectoryStep(0, generated_tokens, 0.0), place, 0.0, missing_tokens, int(missing_tokens)
    )


def ends_s(engine: SimulatedEngine, num_ends: int) -> list[float]:
    """When the next things end."""
    found: list[float] = []
    while len(found) < num_ends:
        engine.advance(engine.next_end_s())
        prefilled, ended = engine.take_ended()
        found += [engine.now_s] * (len(prefilled) + len(ended))
    return found


def test_a_turn_alone_prefills_and_decodes_at_the_engines_speed() -> None:
    engine = SimulatedEngine(SMALL, is_serving=False)
    engine.start(run(200, 10))
    prefill_s = 2 * (0.02 + 0.01)  # two chunks, each with a step's fixed part
    assert ends_s(engine, 2) == pytest.approx([prefill_s, prefill_s + 10 * 0.025])


def test_half_a_gpu_takes_twice_as_long_from_the_moment_it_is_half() -> None:
    engine = SimulatedEngine(SMALL, is_serving=True)
    engine.start(run(0, 100))
    engine.take_ended()
    engine.advance(1.0)
    engine.set_share(0.5)
    assert ends_s(engine, 1) == pytest.approx([1.0 + (100 * 0.025 - 1.0) * 2])


def test_a_prefill_slows_the_turns_beside_it_down() -> None:
    engine = SimulatedEngine(SMALL, is_serving=False)
    engine.start(run(0, 10))
    engine.take_ended()
    engine.start(run(300, 1000))
    mixed_s = 3 * (0.02 + 0.005 + 0.01)
    # After three mixed steps both decode, in steps of two turns.
    assert ends_s(engine, 2) == pytest.approx([mixed_s, mixed_s + 7 * 0.03])


def test_the_cache_keeps_what_fits_and_on_serving_gpus_for_the_lease() -> None:
    engine = SimulatedEngine(replace(SMALL, serving_kv_tokens=100, lease_s=10.0), is_serving=True)
    for trajectory, tokens in ((1, 60), (2, 30), (1, 70)):
        engine.keep(trajectory, tokens)
    assert [engine.cached_tokens(i) for i in (1, 2, 3)] == [70, 30, 0]
    engine.keep(3, 20)  # the one that was not used for longest leaves
    assert [engine.cached_tokens(i) for i in (1, 2, 3)] == [70, 0, 20]
    engine.advance(10.0)
    assert engine.cached_tokens(3) == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_token_of_every_trajectory_is_made_once_and_all_places_are_given_back(policy: str) -> None:
    simulation = RolloutSimulation(SMALL, POLICIES[policy](), seed=3)
    outcome = simulation.run()
    steps = [step for trajectory in trajectories(SMALL, 3) for step in trajectory]
    assert outcome.generated_tokens == sum(step.generated_tokens for step in steps)
    assert outcome.turns == len(steps)
    workers = simulation.members().values()
    assert all(w.in_flight == 0 and abs(w.pending_prefill_tokens) < 1e-6 for w in workers)
    assert 0.0 <= outcome.hit_share < 1.0


def test_the_same_seed_gives_the_same_phase_and_another_one_another() -> None:
    first, again, other = (simulate(SMALL, POLICIES["cost"](), seed) for seed in (1, 1, 2))
    assert first == again != other


def test_affinity_finds_prefixes_that_turnwise_placement_loses() -> None:
    many = replace(SMALL, num_dedicated=4, num_serving=6, num_trajectories=96)
    hits = {name: simulate(many, POLICIES[name](), 1).hit_share for name in ("turnwise", "paper")}
    assert hits["paper"] > hits["turnwise"] + 0.2


def test_without_session_keys_the_same_prefixes_are_found() -> None:
    many = replace(SMALL, num_trajectories=96, group_size=16)
    keyed, found = (
        RolloutSimulation(many, POLICIES["paper"](), 1, has_keys=has_keys).run() for has_keys in (True, False)
    )
    assert found == keyed
    assert keyed.hit_share < keyed.ideal_hit_share < 1.0


def test_a_trajectory_that_never_waits_for_room_finds_all_it_computed_before() -> None:
    alone = replace(SMALL, num_dedicated=1, num_serving=0, num_trajectories=4, kv_tokens=10**7)
    outcome = simulate(alone, POLICIES["paper"](), 1)
    assert outcome.hit_share == pytest.approx(outcome.ideal_hit_share)
    assert outcome.hit_share > 0.5


def test_more_serving_gpus_make_a_phase_shorter() -> None:
    scenario = replace(SMALL, num_trajectories=96)
    alone, helped = (simulate(scenario.with_serving(n), POLICIES["cost"](), 1).makespan_s for n in (0, 6))
    assert helped < 0.8 * alone


@pytest.mark.parametrize("tell", [lambda share: 1.0, lambda share: share])
def test_workers_may_tell_anything_of_their_share(tell: Callable[[float], float]) -> None:
    outcome = RolloutSimulation(SMALL, POLICIES["cost"](), 1, report_share=tell).run()
    assert outcome.turns == simulate(SMALL, POLICIES["paper"](), 1).turns


def test_traffic_has_the_mean_it_was_given_and_bursts() -> None:
    traffic = ServingShare(mean_busy=0.4, gpu_spread=0.0, swing=0.1)
    seconds = [busy for gpu in range(20) for busy in islice(busy_fractions(traffic, gpu, 1), 600)]
    quiet = [busy for busy in seconds if busy < 0.97]
    assert sum(quiet) / len(quiet) == pytest.approx(0.4, abs=0.05)
    assert 0.02 < 1 - len(quiet) / len(seconds) < 0.12
