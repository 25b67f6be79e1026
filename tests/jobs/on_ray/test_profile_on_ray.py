"""`rose sched profile` on a Ray cluster."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from lib.cluster.ray_rig import RayRig

from rose.errors import ConfigError, ProfileError
from rose.jobs.on_ray.measured import Measured, RayRecording
from rose.jobs.profile import main
from rose.scheduler.runtime.job.recording import PhaseRun, Recorder, Recording, read_recording

JOB = Path(__file__).parents[1] / "profiled_job.py"


@pytest.fixture
def cluster(rig: RayRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the Ray cluster, on which nothing is left after the test."""
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("ROSE_CHANNEL", f"unix:{tmp_path / 'other'}")
    bundle = {"GPU": 1, "CPU": 1}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"ray": {"address": rig.address, "rollout": bundle, "train": bundle}}))
    return path


def write_job(folder: Path, mistake: str) -> Path:
    path = folder / "job.yaml"
    spec = {
        "name": "small",
        "command": [sys.executable, str(JOB), mistake, str(folder)],
        "slo": 3.0,
        "max_tokens": 100,
        "iterations": 2,
        "num_ranks": 2,
        "launch": "per-rank",
        "placement": "strict-spread",
        "phases": {"rollout": {}, "train": {"after": ["rollout"]}},
    }
    path.write_text(yaml.safe_dump(spec))
    return path


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "phases.jsonl").read_text().splitlines()]


def placed(address: str) -> list[str]:
    """The states of the Ray cluster's placement groups."""
    ray.init(address=address, log_to_driver=False)
    try:
        return [table["state"] for table in ray.util.placement_group_table().values()]
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_a_job_of_two_ranks_on_two_nodes_is_profiled_where_ray_places_it(
    cluster: Path, rig: RayRig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, "none")
    assert main([str(job), "--cluster", str(cluster), "--iterations", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["iterations"], report["has_asked_tokens"]) == (2, True)
    assert report["phases"]["rollout"]["run_s"]["median"] >= 0.2
    assert report["phases"]["train"]["cached_bytes"] == 2 << 20, "both ranks count"
    assert report["phases"]["rollout"]["peak_own_gib"] > 0
    found = notes(tmp_path)
    assert len({note["pid"] for note in found}) == 2 and {note["num_tokens"] for note in found} == {100}
    assert yaml.safe_load((tmp_path / "job.profiled.yaml").read_text())["phases"]["rollout"]["seconds"] >= 0.2
    assert set(placed(rig.address)) <= {"REMOVED"}


@pytest.mark.slow
def test_a_profile_that_takes_too_long_leaves_nothing_on_the_ray_cluster(
    cluster: Path, rig: RayRig, tmp_path: Path
) -> None:
    job = write_job(tmp_path, "hangs")
    with pytest.raises(ProfileError, match="not done after 20 s"):
        main([str(job), "--cluster", str(cluster), "--timeout-s", "20"])
    for pid in {note["pid"] for note in notes(tmp_path)}:
        assert not Path(f"/proc/{pid}").exists()
    assert set(placed(rig.address)) <= {"REMOVED"}


def test_what_hosts_record_is_put_on_one_clock(tmp_path: Path) -> None:
    recording = RayRecording(Recording(forced_tokens=5, path=str(tmp_path / "all.jsonl")))
    answers = []
    for number, clock_s in enumerate((1000.0, 77.0)):  # what each host's clock says at the same moment
        own = Recording(forced_tokens=5, path=str(tmp_path / f"{number}.jsonl"))
        begin_s = clock_s - 2.0
        run = PhaseRun(
            phase="train",
            rank=number,
            iteration=0,
            begin_s=begin_s,
            load_s=0,
            run_s=1,
            offload_s=0,
            cached_bytes=0,
        )
        Recorder(own).note(run)
        lines = Path(own.path).read_bytes()
        answers.append(Measured(lines=lines, end=len(lines), now_s=clock_s, own_bytes=3))
    recording.take(["rollout-0", "train-0"], answers, 10.0, 10.2)
    assert [run.begin_s for run in read_recording(tmp_path / "all.jsonl").runs] == pytest.approx([8.1, 8.1])
    assert recording.kept("train-0") == answers[1].end and recording.samples[0].own_bytes == 6


def test_a_cluster_file_without_ray_is_refused(tmp_path: Path) -> None:
    cluster, job = tmp_path / "cluster.yaml", tmp_path / "job.yaml"
    cluster.write_text("{}")
    job.write_text(
        yaml.safe_dump(
            {
                "name": "a",
                "command": ["true"],
                "slo": 2.0,
                "max_tokens": 1,
                "iterations": 1,
                "phases": {"rollout": {}, "train": {"after": ["rollout"]}},
            }
        )
    )
    with pytest.raises(ConfigError, match="has no `ray`"):
        main([str(job), "--cluster", str(cluster)])
