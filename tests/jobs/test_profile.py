"""`rose sched profile` on real processes, and what it writes under a real scheduler."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from served_cluster import PATIENCE_S, ServedCluster, wait_until

from rose.errors import ConfigError, ProfileError
from rose.jobs.profile import main

JOB = Path(__file__).with_name("profiled_job.py")
TOKEN_S, TRAIN_S, MAX_TOKENS = 0.002, 0.03, 100


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Logs of profiled jobs go there."""
    path = tmp_path / "run"
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(path))
    return path


def write_job(folder: Path, mistake: str = "none", **fields: Any) -> Path:
    path = folder / "job.yaml"
    spec = {
        "name": "small",
        "command": [sys.executable, str(JOB), mistake, str(folder)],
        "slo": 3.0,
        "max_tokens": MAX_TOKENS,
        "iterations": 2,
        "phases": {"rollout": {"pool": "h20"}, "train": {"after": ["rollout"]}},
        **fields,
    }
    path.write_text(yaml.safe_dump(spec))
    return path


def notes(folder: Path) -> list[dict[str, Any]]:
    path = folder / "phases.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_gone(pid: int) -> None:
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} gone")


@pytest.mark.slow
def test_a_profiled_job_is_submitted_as_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, output = write_job(tmp_path), tmp_path / "elsewhere" / "small.yaml"
    output.parent.mkdir()
    assert main([str(job), "--output", str(output), "--iterations", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["num_tokens"] for each in notes(tmp_path)] == [MAX_TOKENS] * 3
    assert (report["iterations"], report["has_asked_tokens"]) == (2, True)
    rollout, train = report["phases"]["rollout"], report["phases"]["train"]
    assert rollout["run_s"]["worst"] >= rollout["run_s"]["median"] >= MAX_TOKENS * TOKEN_S
    assert train["total_s"]["worst"] >= train["load_s"]["median"] + TRAIN_S
    assert train["cached_bytes"] == 1 << 20 and rollout["peak_own_gib"] > 0
    written = yaml.safe_load(output.read_text())
    assert written["phases"]["rollout"]["seconds"] >= MAX_TOKENS * TOKEN_S
    assert written["phases"]["train"]["memory_gb"] == 0.002 and written["folder"] == str(tmp_path)
    with ServedCluster(tmp_path) as cluster:
        submitted = cluster.command("submit", str(output))
        assert submitted.returncode == 0, submitted.stderr
        assert cluster.wait_state("small", "done")["iterations"] == [2, 2]
    assert [each["num_tokens"] for each in notes(tmp_path)[3:]] == [10, 10], "no run of its own is forced"


@pytest.mark.slow
def test_what_a_job_does_outside_of_phases_is_measured_and_certified(tmp_path: Path) -> None:
    phases = {"rollout": {}, "train": {"after": ["rollout"]}, "checkpoint": {"nodes": 0, "after": ["train"]}}
    job = write_job(tmp_path, "saves", phases=phases)
    assert main([str(job), "--iterations", "2"]) == 0
    written = yaml.safe_load((tmp_path / "job.profiled.yaml").read_text())
    assert written["outside"]["after_rollout_s"] >= 0.1 and written["outside"]["after_train_s"] >= 0.05
    assert written["phases"]["checkpoint"]["seconds"] >= 0.2
    with ServedCluster(tmp_path) as cluster:
        submitted = cluster.command("submit", str(tmp_path / "job.profiled.yaml"))
        assert submitted.returncode == 0, submitted.stderr
        alone_s = sum(phase["seconds"] for phase in written["phases"].values()) + sum(
            written["outside"].values()
        )
        assert json.loads(submitted.stdout)["iteration_s"] == pytest.approx(alone_s)
        cluster.wait_state("small", "done")


def test_a_job_that_forgets_its_tokens_is_told_so_and_so_is_who_reads_its_file(
    tmp_path: Path, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = write_job(tmp_path, "forgets")
    assert main([str(job), "--iterations", "1"]) == 0
    warning = "small never read progress.forced_tokens"
    assert warning in caplog.text
    assert f"# {warning}" in (tmp_path / "job.profiled.yaml").read_text()
    assert (runtime_dir / "logs" / "profile-small.log").exists(), "the job's log is kept"
    with pytest.raises(ConfigError, match="exists; remove it"):
        main([str(job)])


@pytest.mark.parametrize(
    ("mistake", "problem"),
    [
        ("crashes", r"(?s)status 7.* in iteration 0; end of .*profile-small.log:\nno such dataset"),
        ("idles", "status 0 after 0 of 4 iterations; it entered no phase: are its functions under"),
        ("syncs", "enters phase sync, its file has rollout, train; add it"),
    ],
)
@pytest.mark.slow
def test_a_job_that_cannot_be_profiled_says_why_and_nothing_is_written(
    tmp_path: Path, mistake: str, problem: str
) -> None:
    job = write_job(tmp_path, mistake)
    with pytest.raises(ProfileError, match=problem):
        main([str(job)])
    for pid in {each["pid"] for each in notes(tmp_path)}:
        assert_gone(pid)
    assert not (tmp_path / "job.profiled.yaml").exists()


@pytest.mark.slow
def test_a_job_that_hangs_is_ended_at_the_time_limit(tmp_path: Path) -> None:
    job = write_job(tmp_path, "hangs")
    with pytest.raises(ProfileError, match=r"not done after 2 s, 0 of 4 iterations.*larger --timeout-s"):
        main([str(job), "--timeout-s", "2"])
    for pid in {each["pid"] for each in notes(tmp_path)}:
        assert_gone(pid)


@pytest.mark.slow
def test_a_signal_ends_the_job_as_well(tmp_path: Path) -> None:
    job = write_job(tmp_path, "hangs")
    command = [sys.executable, "-m", "rose.cli", "sched", "profile", str(job)]
    with subprocess.Popen(command, env=dict(os.environ)) as profiling:
        try:
            wait_until(lambda: notes(tmp_path), "the job in its rollout")
            profiling.send_signal(signal.SIGTERM)
            assert profiling.wait(PATIENCE_S) == 130
        finally:
            profiling.kill()
    assert_gone(notes(tmp_path)[0]["pid"])
    assert not (tmp_path / "job.profiled.yaml").exists()


@pytest.mark.slow
def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    job = write_job(tmp_path, command=["./train.sh"])
    with pytest.raises(ProfileError, match=r"status 127(?s:.*)can't start \['./train.sh'\]: .*No such file"):
        main([str(job)])


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_job(tmp_path)), "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["state"], plan["iterations"], plan["max_tokens"]) == ("would run", 3, MAX_TOKENS)
    assert plan["output"] == str(tmp_path / "job.profiled.yaml") and not notes(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        main([str(tmp_path / "job.yaml"), "--output", str(tmp_path / "nowhere" / "x.yaml")])
