"""The demo itself: in miniature from end to end, and stopped half-way."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from forked_server import forking

from rose.demo import processes
from rose.demo.plan import SERVING_LOAD, DemoOptions, DemoPlan, Durations
from rose.demo.records import UNDER_ROSE, PhaseName
from rose.demo.run import run_demo
from rose.measure import rig, windows

MINIATURE = Durations(rollout_alone_s=2, window_s=5, training_windows=1)
"""Training goes on to the end of its first step, however long that takes."""
FORKED = (
    *("vllm.entrypoints.openai.api_server", "rose.engine.stock", "rose.demo.trainer"),
    *("rose.measure.replay", "rose.measure.rollout_load"),
)
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
def test_ctrl_c_stops_everything_that_was_started(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "rose.demo.run", "--quick", "--relay", "embedded", "--out", str(tmp_path)]
    demo = subprocess.Popen(argv, start_new_session=True)
    try:
        started = wait_for_engines(demo.pid)
        os.kill(demo.pid, signal.SIGINT)
        assert demo.wait(timeout=600) == 130
    finally:
        demo.kill()
        demo.wait()
    gone, alive = psutil.wait_procs(started, timeout=300)
    assert not alive, alive
    assert gone


def wait_for_engines(pid: int, timeout_s: float = 900.0) -> list[psutil.Process]:
    """The demo's processes once its pool and engines are on their way."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        commands = {each: command_of(each) for each in psutil.Process(pid).children(recursive=True)}
        if sum("api_server" in command for command in commands.values()) >= 3:
            return [process for process, command in commands.items() if command]
        time.sleep(0.5)
    raise AssertionError(f"no engines after {timeout_s} s")


def command_of(process: psutil.Process) -> str:
    """Its command line; empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too
        return ""
