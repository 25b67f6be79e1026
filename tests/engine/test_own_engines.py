"""A job's own rollout engines as the working set of its rollouts, on a real engine."""

from pathlib import Path

import pytest
from shared_gpu import SharedGpu

from rose.errors import ConfigError
from rose.node.control import EngineControl
from rose.scheduler.runtime.job.cache import HostCache
from rose.trainers.own_engines import OwnEngines, by_number
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


def test_a_job_with_fewer_nodes_than_engines_is_refused() -> None:
    engines = [EngineControl(f"http://127.0.0.1:{port}", "") for port in (1, 2)]
    assert by_number((4, 7), [engines, []]) == [(4, engines), (7, [])]
    with pytest.raises(ConfigError, match=r"for 2 rollout nodes, and the job has 1; .*fewest_nodes"):
        by_number((4,), [engines, []])
