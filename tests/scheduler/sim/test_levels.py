"""`--level` of `rose sched simulate` and `rose sched explain`: every level answers, from files of its own."""

import json
from pathlib import Path

import pytest
import yaml

from rose.errors import ConfigError
from rose.scheduler.sim.levels import Level, explain, simulate


def write_cluster(folder: Path, *seconds: tuple[float, float]) -> Path:
    """Jobs with these rollout and training times, which a cheap pool makes worth sharing."""
    jobs = [
        {
            "name": f"job-{number}",
            "slo": 3.0,
            "max_tokens": 1024,
            "iterations": 10,
            "phases": {
                "rollout": {"seconds": rollout_s},
                "train": {"seconds": train_s, "after": ["rollout"]},
            },
        }
        for number, (rollout_s, train_s) in enumerate(seconds)
    ]
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"jobs": jobs}))
    return path


def test_a_group_s_order_is_explained_by_what_bounds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_cluster(tmp_path, (100.0, 60.0), (90.0, 50.0))
    assert explain(["--level", "group", str(path), "--json"]) == 0
    [group] = json.loads(capsys.readouterr().out)
    assert sorted(group["order"]) == ["job-0", "job-1"]
    assert group["why"] == "rollout-0 is never free, so no order is shorter"
    assert group["cycle_s"] == pytest.approx(190.0)
    assert group["jobs"]["job-0"] == {"promised_s": 190.0, "allowed_s": 480.0, "alone_s": 160.0}
    assert explain(["--level", "group", str(path)]) == 0
    assert "job-0: promised 190.0 s, allowed 480.0 s, alone 160.0 s" in capsys.readouterr().out


def test_a_played_group_keeps_its_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_cluster(tmp_path, (100.0, 60.0), (90.0, 50.0))
    assert simulate(["--level", "group", str(path), "--passes", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "simulated"
    for job in report["groups"][0]["jobs"].values():
        assert 0 < job["mean_s"] <= job["promised_mean_s"]
        assert job["longest_s"] <= job["promised_longest_s"] + 60, "a job may have run ahead before"


def test_every_level_explains_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_cluster(tmp_path, (100.0, 60.0)))
    for level, arguments, said in (
        (Level.CLUSTER, [path], "job-0 goes to"),
        (Level.GROUP, [path], "order: job-0; job-0 alone takes as long"),
        (Level.NODE, ["--tasks", "20"], "score"),
        (Level.GPU, [], "plan: shared"),
    ):
        assert explain(["--level", level, *arguments]) == 0
        assert said in capsys.readouterr().out


def test_an_unknown_level_and_a_file_without_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--level rack: the levels are cluster, group, node, gpu"):
        explain(["--level", "rack"])
    with pytest.raises(ConfigError, match="no jobs; list them"):
        simulate(["--level", "group", str(write_cluster(tmp_path))])


def test_one_pass_is_too_few_for_an_iteration_s_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        simulate(["--level", "group", str(write_cluster(tmp_path, (100.0, 60.0))), "--passes", "1"])
    assert "--passes 1: an iteration's length needs two starts; use at least 2" in capsys.readouterr().err
