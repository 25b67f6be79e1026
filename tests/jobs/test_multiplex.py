"""`rose sched multiplex` on real processes: two tiny pipelines, and what it refuses."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose.config import Settings, load_yaml
from rose.errors import ConfigError, WorkerError
from rose.jobs.multiplex import main, read_pair
from rose.jobs.serve import cache_root
from rose.jobs.slowdown import hardware
from rose.scheduler.gpu.slowdown import SlowdownTable
from rose.scheduler.gpu.substages import SubStageKind
from rose.scheduler.sim.gpu_spec import SlowdownFile

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core can't be split")
TINY = ("--width", "32", "--max-tokens", "384", "--samples", "4", "--epochs", "2")
"""Two rollouts that meet in the trials take longer than a measurement needs."""
BOTH = """
import runpy, sys, time, torch
from pathlib import Path
own, other = (Path(each).with_suffix(".started") for each in sys.argv[1:3])
own.touch()
while not other.exists():
    time.sleep(0.01)
sys.argv[1:3] = ["--rewards", sys.argv[1]]
runpy.run_module("rose.measure.tiny_pipeline", run_name="__main__", alter_sys=True)
"""
"""A tiny pipeline that begins when the other one, too, has loaded torch."""


def write_job(folder: Path, name: str, command: list[str] | None = None, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    rewards = folder / f"{name}.jsonl"
    pipeline = [sys.executable, "-m", "rose.measure.tiny_pipeline", "--rewards", str(rewards), *TINY]
    spec = {
        "name": name,
        "command": command if command is not None else [*pipeline, "--seed", str(len(name))],
        "max_tokens": 384,
        "iterations": 7,
        "phases": {"rollout": {}, "train": {"after": ["rollout"]}},
        **fields,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@pytest.fixture(autouse=True)
def _runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("ROSE_CHANNEL", raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    status = main([*map(str, arguments), "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, report


@pytest.mark.slow
def test_a_shared_run_gives_the_same_rewards_and_weights_as_a_serial_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    lines = []
    for name, flags in (("serial", ["--serial"]), ("shared", ["-o", tmp_path / "slowdown.json"])):
        folder = tmp_path / name
        jobs = write_job(folder, "math"), write_job(folder, "coding")
        status, report = run(capsys, *jobs, *flags)
        assert (status, [each["iterations"] for each in report["pipelines"]]) == (0, [7, 7])
        lines.append([(folder / f"{job.stem}.jsonl").read_text() for job in jobs])
    assert lines[0] == lines[1]
    assert lines[0][0] != lines[0][1], "each has a seed of its own"
    # Where one job starts much later, the first one ends during the profile or the trial.
    assert report["mode"] in ("profile", "trial", "shared", "serial") and report["elapsed_s"] > 0
    table = tmp_path / "slowdown.json"
    if table.exists():  # else no pair ran side by side for long enough: that is chance on a busy machine
        assert load_yaml(table, SlowdownFile).to_table().entries


@pytest.mark.slow
def test_microbatches_that_follow_the_share_of_memory_give_the_same_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One job has a quarter of the memory while they share, the other one three quarters."""
    pytest.importorskip("torch")
    kinds = (SubStageKind.ROLLOUT_SMALL, SubStageKind.TRAIN)
    num_cores = len(os.sched_getaffinity(0))
    cheap = SlowdownTable(
        hardware=hardware(num_cores),
        compute=(0.5,),
        memory=(0.25,),
        entries={(one, two): ((1.05,),) for one in kinds for two in kinds},
    )
    table = tmp_path / "slowdown.json"
    table.write_text(SlowdownFile.of(cheap).model_dump_json())
    runs = []
    for name, flags in (("serial", ["--serial"]), ("shared", ["--slowdown", table])):
        rewards = [str(tmp_path / name / f"{job}.jsonl") for job in ("math", "coding")]
        command = [sys.executable, "-c", BOTH]
        options = [*TINY, "--elastic", "--double"]
        jobs = [
            write_job(tmp_path / name, "math", [*command, *rewards, *options]),
            write_job(tmp_path / name, "coding", [*command, *reversed(rewards), *options, "--seed", "1"]),
        ]
        status, report = run(capsys, *jobs, *flags)
        assert status == 0
        logs = [Path(each).read_text().splitlines() for each in rewards]
        runs.append([[json.loads(line) for line in log] for log in logs])
    assert report["mode"] == "shared"
    for serial, shared in zip(*runs, strict=True):
        assert [each["reward"] for each in serial] == [each["reward"] for each in shared]
        assert serial[-1]["microbatches"] < shared[-1]["microbatches"]


@pytest.mark.slow
def test_a_pipeline_that_crashes_leaves_the_cores_to_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    broken = write_job(tmp_path, "broken", [sys.executable, "-c", "raise SystemExit(7)"])
    status, report = run(capsys, broken, write_job(tmp_path, "math", iterations=2))
    assert status == 1
    assert [(each["iterations"], each["exit_status"]) for each in report["pipelines"]] == [(0, 7), (2, 0)]
    assert report["mode"] == "profile", "it ended before anything was shared"


def test_a_pipeline_that_ends_before_its_last_iteration_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [write_job(tmp_path, name, [sys.executable, "-c", ""]) for name in ("one", "two")]
    status, report = run(capsys, *jobs)
    assert [each["exit_status"] for each in report["pipelines"]] == [0, 0]
    assert status == 1


def test_a_table_without_a_measured_pair_is_not_written_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [write_job(tmp_path, name, [sys.executable, "-c", ""]) for name in ("one", "two")]
    main([*map(str, jobs), "-o", str(tmp_path / "slowdown.json")])
    assert "no pair of sub-stages ran side by side for long enough" in capsys.readouterr().err
    assert not (tmp_path / "slowdown.json").exists()


def test_jobs_in_folders_of_their_own_find_a_folder_and_a_channel_that_are_relative(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import rose\n"
        "@rose.runtime_hook\n"
        "def iteration(progress):\n"
        "    rose.phase('rollout')(lambda: None)()\n"
        "iteration()\n"
    )
    command = [sys.executable, "-c", program]
    jobs = [write_job(tmp_path / "own", name, command, iterations=1) for name in ("one", "two")]
    monkeypatch.chdir(tmp_path)
    status, report = run(capsys, *jobs, "--folder", "logs", "--channel", "unix:channel")
    assert (status, [each["iterations"] for each in report["pipelines"]]) == (0, [1, 1])


def test_state_that_a_killed_run_has_left_is_gone_when_the_jobs_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    channel = f"unix:{tmp_path / 'channel'}"
    left = cache_root(Settings.from_environment(), f"{channel} pair") / "one" / "kept"
    left.parent.mkdir(parents=True)
    left.touch()
    check = [sys.executable, "-c", f"import os, sys; sys.exit(9 if os.path.exists({str(left)!r}) else 0)"]
    jobs = [write_job(tmp_path, name, check) for name in ("one", "two")]
    _, report = run(capsys, *jobs, "--channel", "unix:channel")
    assert [each["exit_status"] for each in report["pipelines"]] == [0, 0]


def test_what_can_t_be_shared_is_refused_before_anything_starts(tmp_path: Path) -> None:
    math, code = write_job(tmp_path, "math"), write_job(tmp_path, "code")
    ranks = write_job(tmp_path, "ranks", num_ranks=2)
    nodes = write_job(tmp_path, "nodes", phases={"rollout": {}, "train": {"nodes": 2}})
    too_many = len(os.sched_getaffinity(0)) + 1
    many = write_job(tmp_path, "many", phases={"rollout": {"nodes": too_many}, "train": {}})
    table = {"hardware": "H100", "compute": [0.5], "memory": [0.5], "entries": []}
    other = tmp_path / "h100.json"
    other.write_text(json.dumps(table))
    for arguments, said in (
        ([math, math], "both jobs are named math; give each a name of its own"),
        ([math, ranks], "num_ranks: 2; only jobs of one process"),
        ([math, nodes], "train with nodes: 2; pipelines that share this machine have one, except for a roll"),
        ([math, many], f"nodes: {too_many}; the {too_many - 1} cores here can't be divided into {too_many} "),
        ([math, code, "--slowdown", other, "-o", tmp_path / "new.json"], "omit it with --slowdown"),
        ([math, code, "--slowdown", other], "measured on 'H100', not on .*; leave out --slowdown"),
        ([math, code, "-o", other], "exists; remove it, or choose another"),
        ([math, code, "-o", tmp_path / "no" / "x.json"], "there is no folder .*no; make it"),
    ):
        with pytest.raises(ConfigError, match=said):
            main([str(each) for each in arguments])
    assert not (tmp_path / "run" / "jobs").exists()


def test_rollouts_on_engines_divide_the_cores_in_one_way_and_no_gpu(tmp_path: Path) -> None:
    two, three = (
        write_job(tmp_path, name, phases={"rollout": {"nodes": nodes}, "train": {}})
        for name, nodes in (("two", 2), ("three", 3))
    )
    one = write_job(tmp_path, "one")
    assert [spec.name for spec in read_pair([two, one], 12, is_gpu=False)] == ["two", "one"]
    with pytest.raises(ConfigError, match=r"rollouts with nodes: 2 and 3; .* give both jobs the same number"):
        read_pair([two, three], 12, is_gpu=False)
    with pytest.raises(ConfigError, match="rollout with nodes: 2; pipelines that share a GPU have one"):
        read_pair([two, one], 132, is_gpu=True)


def test_a_command_that_can_t_start_is_named(tmp_path: Path) -> None:
    nowhere = write_job(tmp_path, "nowhere", ["/nowhere/python"])
    with pytest.raises(WorkerError, match=r"job nowhere: can't start .*'/nowhere/python'"):
        main([str(nowhere), str(write_job(tmp_path, "math"))])
