"""The files in examples/ and the example in the help text are complete: they run as they are."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from served_cluster import ServedCluster

from rose.config import load_yaml, parse_config
from rose.errors import ConfigError
from rose.scheduler.runtime.job.spec import EXAMPLE, LEAST, RunSpec, ServeSpec, read_job

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.slow
def test_the_example_job_runs_on_the_example_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The job's command is `python`: as in an activated environment, that is ours.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    content: dict[str, Any] = yaml.safe_load((EXAMPLES / "cluster.yaml").read_text())
    with ServedCluster(tmp_path, **content) as cluster:
        submitted = cluster.command("submit", str(EXAMPLES / "job.yaml"))
        assert submitted.returncode == 0, submitted.stderr
        assert cluster.wait_state("example", "done")["iterations"] == [5, 5]
        assert "trained on 4 samples" in cluster.command("logs", "example").stdout


def test_the_example_files_name_every_key_that_has_no_better_default() -> None:
    content, spec = read_job(EXAMPLES / "job.yaml")
    assert spec.to_job(load_yaml(EXAMPLES / "cluster.yaml", ServeSpec).pools.to_pools()).solo_s == 4.0
    optional = {"slo_kind", "team", "group", "rollout_nodes", "tail", "ray", "placement", "runtime_env"}
    optional |= {"start_s", "hung_s", "borrow"}
    assert set(RunSpec.model_fields) - set(content) == optional


@pytest.mark.parametrize("text", [EXAMPLE, LEAST], ids=["help", "error"])
def test_the_jobs_in_help_and_errors_are_complete(text: str) -> None:
    parse_config(yaml.safe_load(text), RunSpec, "example")


def test_a_job_file_without_iterations_is_refused_with_a_complete_one(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    content: dict[str, Any] = yaml.safe_load(LEAST)
    del content["iterations"]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as refused:
        read_job(path)
    assert str(refused.value) == f"{path}: iterations missing; the least job is {LEAST}"
