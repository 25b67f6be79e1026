"""`rose sched simulate --level gpu`: its figures, its reasons, and what it refuses."""

import json
from pathlib import Path

import pytest
import yaml

from rose.errors import ConfigError
from rose.scheduler.gpu.substages import SubStageKind
from rose.scheduler.sim.levels import simulate as main

KINDS = [kind.value for kind in SubStageKind if kind is not SubStageKind.TOOL]
LINE = (
    "INFO 11-23 14:00:01 [loggers.py:199] Engine 000: Iteration(0): 0 context requests, 0 context tokens, "
    "{running} generation requests, {running} generation tokens, iteration elapsed time: 100.00 ms, "
    "GPU KV cache usage: 1.0%\n"
)


def write_pair(folder: Path, *, hardware: str = "H100", num_logs: int = 2, log: str | None = None) -> Path:
    """Two pipelines with a rollout of 10 s and a training of 10 s, and a table."""
    rollout = "".join(LINE.format(running=running) * 50 for running in (4, 1))
    (folder / "engine.log").write_text(log if log is not None else rollout)
    entries = [
        {"kind": one, "beside": two, "slowdown": [[2.5 if one == two == "train" else 1.1]]}
        for one in KINDS
        for two in KINDS
    ]
    table = {"hardware": "H100", "compute": [0.5], "memory": [0.5], "entries": entries}
    (folder / "slowdown.json").write_text(json.dumps(table))
    pipelines = [
        {"name": "math", "logs": ["engine.log"] * 2, "train_s": 10},
        {"name": "code", "logs": ["engine.log"] * num_logs, "train_s": 10},
    ]
    path = folder / "pair.yaml"
    path.write_text(
        yaml.safe_dump({"hardware": hardware, "slowdown": "slowdown.json", "pipelines": pipelines})
    )
    return path


def test_a_pair_of_real_logs_is_planned_with_its_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--level", "gpu", str(write_pair(tmp_path))]) == 0
    printed = capsys.readouterr().out
    assert "math and code on 2 workers, H100; an iteration alone: 20.0 s and 20.0 s" in printed
    assert "; the predicted throughput is" in printed
    assert "math train 50% of compute, 50% of memory; code rollout-small 50% of compute" in printed
    assert main(["--level", "gpu", str(tmp_path / "pair.yaml"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "predicted" and 1.5 < report["gain"] < 2


def test_without_a_table_the_pipelines_are_serial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_pair(tmp_path)
    content = yaml.safe_load(path.read_text())
    del content["slowdown"]
    path.write_text(yaml.safe_dump(content))
    assert main(["--level", "gpu", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "one iteration after the other, because there is no slowdown table" in printed
    assert "rose sched slowdown" in printed


def test_without_a_file_a_workload_of_the_paper_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--level", "gpu", "--workload", "8B-Instruct GSM8K", "--iterations", "2", "--json"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "simulated" and report["gain"] > 1.2


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    for changes, message in (
        ({"hardware": "A100"}, "measured on 'H100', not on 'A100'"),
        ({"num_logs": 3}, "as many logs each, got 2 and 3"),
        ({"log": "INFO nothing\n"}, "no steps of a rollout; start the engine with"),
    ):
        with pytest.raises(ConfigError, match=message):
            main(["--level", "gpu", str(write_pair(tmp_path, **changes))])


def test_a_table_that_can_not_be_is_refused(tmp_path: Path) -> None:
    path = write_pair(tmp_path)
    table = json.loads((tmp_path / "slowdown.json").read_text())
    table["compute"] = [1.5]
    (tmp_path / "slowdown.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"slowdown.json: compute levels must ascend within \(0, 1\]"):
        main(["--level", "gpu", str(path)])


@pytest.mark.parametrize(
    "argv", [["--seed", "1", "--level", "gpu", "--trace", "x.csv"], ["--level", "gpu", "--worker", "99"]]
)
def test_wrong_flags_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert "error: sched simulate" in capsys.readouterr().err
