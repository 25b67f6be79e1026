"""The demo itself: in miniature from end to end, and stopped half-way."""

import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from forked_server import ForkedServer, forking
from real_engine import until

from rose.demo import processes
from rose.demo.plan import SERVING_LOAD, DemoOptions, DemoPlan, Durations
from rose.demo.processes import DEDICATED, ROLLOUT, SERVING
from rose.demo.records import UNDER_ROSE, PhaseName
from rose.demo.run import run_demo
from rose.measure import rig, windows
from rose.node.processes import ServerProcess

MINIATURE = Durations(rollout_alone_s=2, window_s=5, training_windows=1)
"""Training goes on to the end of its first step, however long that takes."""
FORKED = (
    *("vllm.entrypoints.openai.api_server", "rose.engine.stock", "rose.demo.trainer"),
    *("rose.measure.replay", "rose.measure.rollout_load"),
)
STARTED_S = 900.0
LEAD_S = 1.0
"""Forked clients import nothing before their window. One that is late begins at once."""
LIGHT = replace(SERVING_LOAD, rate_rps=0.8, max_prompt_tokens=128, max_output_tokens=24, drain_s=600)
"""A machine several times slower has time for rollouts beside it, and ends it."""


@pytest.fixture(autouse=True)
def _private(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile that another run of this test left under the same name, and none left behind."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.vllm
@pytest.mark.slow
def test_the_whole_loop_runs_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "LEAD_S", LEAD_S)
    for module in (rig, processes):  # on a busy machine, what gives way would wait for minutes
        monkeypatch.setattr(module, "give_way", lambda _pid: None)
    options = DemoOptions(out_dir=tmp_path, quick=True, relay="embedded")
    with forking(*FORKED):
        before = descendants()
        result = run_demo(replace(DemoPlan.of(options), durations=MINIATURE, serving=LIGHT))
    assert result.greedy_compared > 0
    assert result.greedy_equal == result.greedy_compared
    assert result.steps
    for step in result.steps:
        assert list(step.engine_hashes) == [step.state_hash] * 2
    # How many tokens rollouts make within seconds is the machine's to say; the rewards are theirs as well.
    assert len(result.windows(PhaseName.ROSE)) == 1
    (static,) = result.windows(PhaseName.STATIC)
    assert static.requests and all(request.is_complete for request in static.requests)
    requests = [request for window in result.windows(*UNDER_ROSE) for request in window.requests]
    assert requests and all(request.is_complete for request in requests)
    assert max(sample.rollout for sample in result.slab_samples) > 1
    assert descendants() <= before


@pytest.mark.vllm
@pytest.mark.slow
def test_ctrl_c_stops_everything_that_was_started(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "rose.demo.run", "--quick", "--relay", "embedded", "--out", str(tmp_path)]
    logs = [tmp_path / "logs" / f"{name}.log" for name in (SERVING, ROLLOUT, DEDICATED)]
    with forking(*FORKED):
        before = descendants()
        with ForkedServer(ServerProcess(argv, "demo", tmp_path / "demo.out"), *FORKED) as demo:
            demo.wait_until(lambda: all(log.exists() for log in logs), "engines on their way", STARTED_S)
            demo.send_signal(signal.SIGINT)
            assert demo.wait(STARTED_S) == 130, demo.log_tail()
        until(lambda: descendants() <= before, "the end of all that it has started")
