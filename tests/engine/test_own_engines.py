"""A job's own rollout engines as the working set of its rollouts, on a real engine."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from probes import prompt
from real_engine import until
from shared_gpu import LedgerLog, SharedGpu

from rose.errors import ConfigError, WorkerError
from rose.messages import WorkerStatus
from rose.node.control import EngineControl
from rose.ports import free_port
from rose.scheduler.runtime.job.cache import HostCache
from rose.trainers.own_engines import OwnEngines, places, run_between
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
        ((0, 1, 2), {0: "c", 1: "a", 2: "b"}, {}, {0: 2, 1: 0, 2: 1}),
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


def test_steps_are_told_by_node_since_the_last_call(gpu: SharedGpu) -> None:
    engine = gpu.engine(Role.ROLLOUT)
    engines = OwnEngines([[], [engine.url]])
    engine.complete(PROMPT, 8)
    idle, busy = engines.engine_runs()
    assert (busy.num_steps, busy.tokens) == (0, 0), "nothing at the first call"
    engine.complete(PROMPT, 8)
    until(lambda: not engine.status().num_running, "the request has left the engine")
    idle, busy = engines.engine_runs()
    assert (idle.num_steps, idle.seconds, idle.tokens, idle.num_requests) == (0, 0.0, 0, 0)
    assert (busy.num_steps, busy.generated, busy.num_requests) == (8, 8, 0)
    assert busy.tokens == len(PROMPT) + 7 and busy.seconds > 0
    assert engines.engine_runs() == [idle, idle]
    engines.move_tail((0,))
    EngineControl(engine.url, "").activate()
    engine.complete(PROMPT, 8)
    assert engines.engine_runs() == [idle, idle], "the tail has left the node"


def status(
    steps: int, busy_s: float, tokens: int, num_running: int = 0, ranks: Sequence[WorkerStatus] = ()
) -> WorkerStatus:
    return WorkerStatus.model_construct(
        steps=steps,
        busy_s=busy_s,
        computed_tokens=tokens,
        generated_tokens=tokens,
        num_running=num_running,
        num_waiting=0,
        ranks=list(ranks),
    )


def test_ranks_and_engines_that_step_side_by_side_count_with_the_steps_of_the_busiest() -> None:
    """One of two decodes a tail of 100 tokens alone, at 0.1 s a step."""
    begun = status(10, 1.0, 40), status(10, 1.0, 40)
    ended = status(110, 11.0, 140, num_running=1), status(20, 2.0, 60)
    in_ranks = status(20, 2.0, 80, ranks=begun), status(130, 13.0, 200, num_running=1, ranks=ended)
    for run in (run_between(list(zip(begun, ended, strict=True))), run_between([in_ranks])):
        assert (run.num_steps, run.seconds) == (100, 10.0)
        assert (run.tokens, run.generated, run.num_requests) == (120, 120, 1)


def test_an_engine_that_was_started_anew_counts_from_zero() -> None:
    run = run_between([(status(100, 10.0, 400), status(5, 0.5, 20))])
    assert (run.num_steps, run.seconds, run.tokens) == (5, 0.5, 20)


def test_an_engine_that_is_gone_is_named_when_its_tail_should_move() -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    engines = OwnEngines([[url] for url in urls])
    for call in (lambda: engines.move_tail((0,)), lambda: OwnEngines([[urls[1]]]).engine_runs()):
        with pytest.raises(WorkerError, match=rf"{urls[1]}/rose/.*is an engine running there\?"):
            call()
