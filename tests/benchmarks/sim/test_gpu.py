"""The baselines of bench_jigsaw: what they let run together, and their known cycle times."""

import pytest
from sim.gpu.baselines import Disaggregated, RolloutOnly, TimeMultiplexing

from rose.scheduler.gpu.lookahead import ALONE, Next
from rose.scheduler.gpu.player import Player
from rose.scheduler.gpu.substages import DecodeCost, Iteration, PhaseChains, SubStage, SubStageKind

ROLLOUT, TRAIN = (
    Next(kind=SubStageKind.ROLLOUT_SMALL, seconds=10.0),
    Next(kind=SubStageKind.TRAIN, seconds=10.0),
)


def test_only_rollouts_share_a_gpu_under_rollout_only() -> None:
    policy = RolloutOnly()
    assert policy.decide(([ROLLOUT], [ROLLOUT]), 0).is_shared
    assert policy.decide(([ROLLOUT], [TRAIN]), 0) == ALONE[1]
    assert policy.decide(([TRAIN], [TRAIN]), 0) == ALONE[0]


@pytest.mark.parametrize(("train_s", "cycle_s"), [(10.0, 20.0), (30.0, 60.0)])
def test_pools_that_take_turns_are_as_slow_as_the_busier_one(train_s: float, cycle_s: float) -> None:
    """Rollout 10 s: two jobs need 20 s of the rollout pool and twice the training of the other."""
    phases = [
        PhaseChains(chains=((SubStage(kind=kind, seconds=seconds),),), is_elastic=kind is SubStageKind.TRAIN)
        for kind, seconds in ((SubStageKind.ROLLOUT_SMALL, 10.0), (SubStageKind.TRAIN, train_s))
    ]
    graph = Iteration(
        phases=tuple(phases), cost=DecodeCost(step_s=1.0, sample_s=0.0, prefill_token_s=0.0), num_samples=8
    )
    result = Player([[graph] * 6] * 2, Disaggregated(), TimeMultiplexing()).play()
    assert result.latencies_s[0][-1] == pytest.approx(cycle_s)
