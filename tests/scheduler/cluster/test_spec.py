import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose.cli import main
from rose.config import load_yaml, parse_config
from rose.errors import ConfigError
from rose.scheduler.cluster.spec import JOBS_EXAMPLE, ClusterSpec
from rose.scheduler.runtime.job.spec import ServeSpec


def example(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(JOBS_EXAMPLE)
    content["jobs"][0] |= changes
    return content


def changed(phase: str, **keys: Any) -> dict[str, Any]:
    content = example()
    content["jobs"][0]["phases"][phase] |= keys
    return content


def test_the_example_is_a_job() -> None:
    (job,) = parse_config(example(), ClusterSpec, "cluster.yaml").to_jobs()
    assert (job.rollout_s, job.train_s, job.after_train_s, job.rollout_bytes) == (120, 100, 8, 276 * 10**9)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            changed("rollout", memory_gb=2001),
            "rollout keeps 2001 GB on each node, but h20 nodes have 2000 GB",
        ),
        (changed("train", nodes=0), "train with nodes: 0; train needs at least one node"),
        (changed("sync", nodes=2), "sync with nodes: 2; only rollout and train hold nodes; write nodes: 0"),
        (changed("sync", seconds=None), "sync has no seconds; rose sched profile measures them"),
        (changed("train", nodes=21), "train needs 21 nodes, but pool h800 has 20"),
        (changed("train", pool="a100"), "train names pool a100, but train phases run on h800"),
        (changed("train", seconds=None), "train has no seconds; rose sched profile measures them"),
        (changed("train", after=["sync"]), "phases wait for each other"),
        (changed("rollout", after=["nothing"]), "rollout comes after nothing, which is no phase"),
        (example(slo=1.0), "slo 1 allows no slowdown at all"),
        (example(phases={"rollout": {}}), "phase train is missing; add it"),
        (
            example(phases={"rolout": {}, "train": {}}),
            "phase rollout is missing; rolout may be a misspelling of it",
        ),
        ({"jobs": example()["jobs"] * 2}, "2 jobs are named math-7b"),
    ],
)
def test_what_could_never_run_is_refused_with_the_numbers(content: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(content, ClusterSpec, "cluster.yaml").to_jobs()
    assert said in str(refused.value)


def test_explain_says_where_a_job_goes_and_what_refused_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = example()
    content["jobs"].append(content["jobs"][0] | {"name": "second"})
    content["jobs"].append(content["jobs"][0] | {"name": "third"})
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    assert load_yaml(path, ClusterSpec).jobs[2].name == "third"
    assert main(["sched", "explain", str(path), "--job", "second", "--policy", "weave", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["group"], report["kind"], report["beside"]) == ("g1", "direct packing", ["math-7b"])
    assert main(["sched", "explain", str(path), "--policy", "weave"]) == 0
    assert "refused, saturated: 240.0 s of work in a cycle of 228.0 s" in capsys.readouterr().out
    assert main(["sched", "explain", str(path), "--job", "nobody"]) == 2


def test_gantt_draws_every_phase_on_its_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = example()
    content["jobs"].append(content["jobs"][0] | {"name": "second"})
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    assert main(["sched", "gantt", str(path), "--policy", "weave"]) == 0
    title, rollout, train, *jobs = capsys.readouterr().out.splitlines()
    assert title == "g1: 240 s"
    # 120 s of rollout and 100 s of training of each, in 240 s.
    assert [rollout.count(letter) for letter in "AB."] == [36, 36, 0]
    assert [train.split()[1].count(letter) for letter in "AB."] == [30, 30, 12]
    assert jobs == ["  A math-7b, every 240.0 s", "  B second, every 240.0 s"]


@pytest.mark.parametrize(
    ("pool", "ray", "num_gpus"),
    [({}, None, 8), ({}, {"GPU": 4}, 4), ({"gpus_per_node": 2}, {"GPU": 4}, 2), ({}, {"CPU": 4}, 8)],
)
def test_a_node_is_priced_by_the_gpus_that_it_takes_of_a_ray_node(
    pool: dict[str, int], ray: dict[str, int] | None, num_gpus: int
) -> None:
    content = {"pools": {"rollout": {"name": "h20", "dollars_per_gpu_hour": 2.0, **pool}}}
    cluster = ServeSpec.model_validate(content | ({"ray": {"rollout": ray}} if ray is not None else {}))
    assert cluster.to_pools().rollout.dollars_per_node_hour == 2.0 * num_gpus
