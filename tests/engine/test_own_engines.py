"""A job's own rollout engines as the working set of its rollouts, on a real engine."""

from pathlib import Path

import pytest
from probes import prompt
from real_engine import until
from shared_gpu import LedgerLog, SharedGpu

from rose.errors import ConfigError
from rose.scheduler.runtime.job.cache import HostCache
from rose.trainers.own_engines import OwnEngines, places
from rose.types import Role

pytestmark = pytest.mark.vllm
PROMPT = [3, 1, 4, 1, 5]


def test_engines_are_active_in_rollouts_alone_and_leave_the_nodes_that_a_tail_does_not_keep(
    gpu: SharedGpu, tmp_path: Path
) -> None:
    engine, cache = gpu.engine(Role.ROLLOUT), HostCache(tmp_path, 0, "rollout of a")
    before = engine.complete(PROMPT, 8).tokens
    engines = OwnEngines([[], [engine.url]])
    engines.move_tail((1,))
    assert engine.status().is_active, "the tail keeps its node"
    engines.move_tail((0,))
    assert not engine.status().is_active
    engines.offload(cache)
    assert not engine.status().is_active
    engines.load(cache)
    assert engine.status().is_active
    assert engine.complete(PROMPT, 8).tokens == before


def test_a_share_of_memory_bounds_an_engine_s_slabs_until_it_is_activated_again(
    gpu: SharedGpu, tmp_path: Path
) -> None:
    engine, cache = gpu.engine(Role.ROLLOUT), HostCache(tmp_path, 0, "rollout of a")
    engines = OwnEngines([[engine.url]])
    prompts = [prompt(f"share-{number}", 200) for number in range(12)]
    bound = gpu.ledger.policy.rollout_budget_slabs // 4
    with LedgerLog(gpu.ledger) as log:
        before = [engine.complete(each, 8).tokens for each in prompts]
    assert log.peak[Role.ROLLOUT] > bound, "their prefixes are cached"
    engines.take_memory(0.25)
    until(lambda: gpu.ledger.num_held(Role.ROLLOUT) <= bound, "the cache beyond the share is given back")
    with LedgerLog(gpu.ledger) as log:
        assert [engine.complete(each, 8).tokens for each in prompts] == before
    assert log.peak[Role.ROLLOUT] <= bound
    engines.load(cache)
    with LedgerLog(gpu.ledger) as log:
        assert [engine.complete(each, 8).tokens for each in prompts] == before
    assert log.peak[Role.ROLLOUT] > bound


@pytest.mark.parametrize(
    ("numbers", "addresses", "before", "expected"),
    [
        ((4, 7, 8), {}, {}, {4: 0, 7: 1, 8: 2}),
        ((4, 8), {}, {4: 0, 7: 1, 8: 2}, {4: 0, 8: 2}),
        ((4, 5, 8), {}, {4: 0, 8: 2}, {4: 0, 5: 1, 8: 2}),
        ((0, 2), {}, {}, {0: 0, 2: 2}),
        ((2, 9), {}, {}, {2: 2, 9: 0}),
        ((9, 1), {}, {}, {9: 0, 1: 1}),
        ((4, 8), {4: "c", 8: "a"}, {}, {4: 2, 8: 0}),
        ((4, 8), {4: "elsewhere", 8: "too"}, {}, {4: 0, 8: 1}),
    ],
)
def test_a_job_with_fewer_nodes_uses_the_engines_of_those_that_it_has(
    numbers: tuple[int, ...], addresses: dict[int, str], before: dict[int, int], expected: dict[int, int]
) -> None:
    assert places(numbers, ["a", "b", "c"], addresses, before) == expected


def test_a_node_without_engines_is_named() -> None:
    with pytest.raises(ConfigError, match="for 1 rollout nodes, and the job has 2"):
        places((0, 1), ["a"], {}, {})
    with pytest.raises(ConfigError, match="rollout node 8 is at d, and no free engine"):
        places((4, 8), ["a", "b", "c"], {4: "a", 8: "d"}, {})
