"""Whole iterations under the shipped policy, and the choice between sharing and serial."""

import random
from dataclasses import replace

import pytest

from rose.scheduler.gpu.lookahead import ALONE
from rose.scheduler.gpu.plan import Multiplexing, choose
from rose.scheduler.gpu.player import PairResult, Player
from rose.scheduler.gpu.slowdown import SlowdownTable
from rose.scheduler.gpu.substages import DecodeCost, Iteration, PhaseChains, SubStage, SubStageKind, spread
from rose.scheduler.sim.gpu_workloads import WORKLOADS, ModelledGpu, PipelineWorkload, draw, profiled

COST = DecodeCost(step_s=0.1, sample_s=0.0, prefill_token_s=0.0)
KINDS = [kind for kind in SubStageKind if kind is not SubStageKind.TOOL]


def table(**slowdowns: float) -> SlowdownTable:
    """The same slowdowns for every split; 1.0 unless a pair is named."""
    return SlowdownTable(
        hardware="test",
        entries={
            (one, two): ((slowdowns.get(f"{one}_{two}".replace("-", "_"), 1.0),),)
            for one in KINDS
            for two in KINDS
        },
        compute=(0.5,),
        memory=(0.5,),
    )


def graph(rollouts: tuple[tuple[int, ...], ...], train_s: float) -> Iteration:
    """A rollout with these lengths on each worker, and training."""
    chains = tuple(
        (SubStage(kind=SubStageKind.ROLLOUT_SMALL, seconds=COST.seconds(left), left=left),)
        for left in rollouts
    )
    train = (SubStage(kind=SubStageKind.TRAIN, seconds=train_s),)
    phases = PhaseChains(chains=chains), PhaseChains(chains=(train,) * len(rollouts), is_elastic=True)
    return Iteration(phases=phases, cost=COST, num_samples=1200)


def play(
    slowdowns: SlowdownTable, *graphs: Iteration, merges: bool = False, is_balanced: bool = True
) -> PairResult:
    policy = Multiplexing(slowdowns, 3, merges=merges, is_balanced=is_balanced)
    return Player([[each] * 6 for each in graphs], slowdowns, policy).play()


def test_one_pipeline_alone_takes_its_own_time() -> None:
    alone = graph(((100,), (50,)), 5.0)
    result = play(table(), alone)
    assert result.latencies_s[0] == pytest.approx((15.0,) * 5)
    assert result.gain == pytest.approx(1.0)
    assert result.slowdown == pytest.approx(1.0)


def test_pipelines_that_cost_each_other_nothing_run_twice_as_much() -> None:
    result = play(table(), graph(((100,),), 10.0), graph(((100,),), 10.0))
    assert result.gain == pytest.approx(2.0)
    assert result.slowdown == pytest.approx(1.0)


def test_trainings_that_hinder_each_other_hide_behind_rollouts() -> None:
    """Rollout 10 s, training 10 s: after a first wait, each trains while the other rolls out."""
    one = graph(((100,),), 10.0)
    result = play(table(train_train=2.5), one, one)
    assert result.latencies_s[1][0] == pytest.approx(30.0)
    assert result.latencies_s[1][1:] == pytest.approx((20.0,) * (len(result.latencies_s[1]) - 1))


def test_a_barrier_waits_for_the_slowest_worker() -> None:
    result = play(table(), graph(((100,), (10,)), 1.0), graph(((10,), (100,)), 1.0))
    assert result.latencies_s[0][0] == pytest.approx(11.0)


def test_workers_beside_a_tail_get_less_of_a_batch() -> None:
    """One of two workers trains at half speed: balanced 1 / 0.75 as long, else twice as long."""
    tail = graph(((1000,), (1,)), 1000.0)
    train = graph(((1,), (1,)), 30.0)
    slowed = table(train_rollout_small=2.0)
    assert play(slowed, tail, train).latencies_s[1][0] == pytest.approx(0.1 + 40.0)
    assert play(slowed, tail, train, is_balanced=False).latencies_s[1][0] == pytest.approx(0.1 + 60.0)


def test_merged_tails_leave_the_other_pipeline_alone() -> None:
    tails = graph(((10, 400), (10, 400), (10, 400), (10, 400)), 10.0)
    train = graph(((5,), (5,), (5,), (5,)), 40.0)
    slowed = table(train_rollout_small=2.0, train_train=2.5)
    merged, apart = (play(slowed, tails, train, merges=merges) for merges in (True, False))
    assert any(event.merged == 0 for event in merged.events)
    assert not any(event.merged is not None for event in apart.events)
    assert merged.gain > apart.gain


def on_engines(rollouts: tuple[tuple[int, ...], ...], train_s: float) -> Iteration:
    """As `graph`, with a rollout that neither shares a worker nor pauses."""
    made = graph(rollouts, train_s)
    rollout, train = made.phases
    return replace(made, phases=(replace(rollout, is_exclusive=True), train))


def test_a_rollout_on_engines_leaves_workers_to_a_pipeline_of_one_process_by_a_merge_alone() -> None:
    tails = on_engines(((10, 400), (10, 400)), 5.0)
    process = spread(graph(((100,),), 20.0), 2)
    merged, apart = (play(table(), tails, process, merges=merges) for merges in (True, False))
    rollouts = [each for each in merged.events if each.kinds[0] is SubStageKind.ROLLOUT_SMALL and each.action]
    assert rollouts and all(each.action == ALONE[0] for each in rollouts[:2])
    assert any(each.merged == 0 for each in merged.events)
    assert not any(each.merged == 1 for each in merged.events), "one process has no tails"
    # By this table all else may be shared at no cost: 45 s alone, of which 40 s keep both workers.
    assert 1.0 < apart.gain < 1.5
    assert merged.gain > 1.15 * apart.gain


def test_of_two_rollouts_on_engines_the_second_waits_for_all_workers() -> None:
    one = on_engines(((100,), (10,)), 1.0)
    result = play(table(train_train=9.0, train_rollout_small=9.0, rollout_small_train=9.0), one, one)
    assert result.gain == pytest.approx(1.0, abs=0.1)


def test_no_sample_is_lost_in_a_merge() -> None:
    """The merged tail takes as long as its longest sample, wherever it ran."""
    tails = graph(((10, 200), (10, 400)), 10.0)
    train = graph(((5,), (5,)), 60.0)
    result = play(table(train_rollout_small=2.0, train_train=2.5), tails, train, merges=True)
    assert result.latencies_s[0][0] >= 40.0


def test_without_measured_pairs_the_plan_is_serial() -> None:
    one = graph(((100,),), 10.0)
    plan = choose((one, one), SlowdownTable(hardware="none", entries={}))
    assert plan.window is None and plan.gain == 1.0


def test_sharing_that_does_not_pay_is_not_planned() -> None:
    one = graph(((100,),), 10.0)
    everywhere = {f"{a}_{b}".replace("-", "_"): 2.2 for a in KINDS for b in KINDS}
    assert choose((one, one), table(**everywhere)).window is None


@pytest.mark.parametrize("workload", WORKLOADS[::4], ids=lambda each: each.name)
def test_the_papers_workloads_gain_and_the_same_seed_gives_the_same_result(
    workload: PipelineWorkload,
) -> None:
    def once() -> PairResult:
        chance = random.Random(1)
        gpu = ModelledGpu()
        measured = profiled(gpu, chance)
        drawn = [draw(workload, 3, 4, chance) for _ in range(2)]
        plan = choose((drawn[0][0], drawn[1][0]), measured)
        assert plan.window is not None
        return Player(drawn, gpu, Multiplexing(measured, plan.window)).play()

    first = once()
    assert first.gain > 1.2
    assert once() == first


def test_pipelines_on_different_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="on the same workers"):
        play(table(), graph(((1,),), 1.0), graph(((1,), (1,)), 1.0))
