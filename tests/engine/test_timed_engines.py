"""A job's own engines are timed by `rose sched profile`, so that its tails can move."""

import json
import os
import sys
from pathlib import Path

import pytest
import timed_job
import yaml
from shared_gpu import SharedGpu

from rose.jobs.profile import main
from rose.messages import Profile
from rose.scheduler.runtime.job.spec import read_job
from rose.trainers.engine_times import times_of
from rose.types import Role

NUM_RESPONSES = 64


def profile_of(**costs: float) -> Profile:
    """An engine that takes these seconds, with prefills of at most 100 tokens a step."""
    model = {
        "base_s": 0.01,
        "per_prefill_token_s": 0.0,
        "per_decode_s": 0.0,
        "per_context_token_s": 0.0,
        "per_prefill_pair_s": 0.0,
        "ratio_q99": 1.0,
        "margin_s": 0.001,
        **costs,
    }
    return Profile(file="", model=model, observations=[(100, 0, 0, 0.0, 0.02), (1, 3, 9, 0.0, 0.01)])


def test_a_node_is_as_fast_as_its_engines_together_and_the_slowest_node_counts() -> None:
    slow = profile_of(per_decode_s=0.001, per_context_token_s=1e-6, per_prefill_token_s=1e-4)
    fast = profile_of(base_s=0.005)
    times = times_of([[slow, slow], [fast], []], prompt_tokens=200, max_tokens=800)
    assert times.step_s == 0.01 and times.prompt_tokens == 200
    assert times.request_s == pytest.approx((0.001 + 1e-6 * 1000) / 2), (
        "each engine has half of the responses"
    )
    assert times.prefill_tokens_per_s == pytest.approx(2 * 1000 / (10 * 0.01 + 1000 * 1e-4))


@pytest.mark.vllm
@pytest.mark.slow
def test_a_profile_writes_how_fast_a_job_s_own_engines_are(
    gpu: SharedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    engine, path = gpu.engine(Role.ROLLOUT), tmp_path / "job.yaml"
    spec = {
        "name": "timed",
        "command": [sys.executable, timed_job.__file__, engine.url],
        "max_tokens": timed_job.MAX_TOKENS,
        "iterations": 5,
        "phases": {"rollout": {"nodes": 2}, "train": {"after": ["rollout"]}},
    }
    path.write_text(yaml.safe_dump(spec))
    assert main([str(path), "--iterations", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    _, written = read_job(tmp_path / "job.profiled.yaml")
    assert written.tail is not None and written.tail.model_dump() == told["tail"]
    assert written.tail.prompt_tokens == timed_job.PROMPT_TOKENS, (
        "prompts of the engine's profile don't count"
    )
    assert written.tail.pause_s >= max(1.0, told["phases"]["rollout"]["offload_s"]["worst"])
    assert told["phases"]["rollout"]["total_s"]["worst"] < 1e3 * written.tail.step_s * timed_job.MAX_TOKENS
    speed = written.speed
    assert speed is not None and speed.num_workers == 2
    assert not engine.status().is_active, "offloaded, as after every rollout"
