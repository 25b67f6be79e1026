"""The files of examples/jobs-on-ray parse, and start the Ray nodes that their cluster file asks for."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose.config import load_yaml, parse_config
from rose.jobs.on_ray.cluster import capacity
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.job.spec import RayClusterSpec, ServeSpec, read_job

EXAMPLES = Path(__file__).parents[3] / "examples" / "jobs-on-ray"
UNLIMITED: dict[Phase, int | None] = dict.fromkeys(Phase)


def held(spec: RayClusterSpec, nodes: list[dict[str, float]]) -> dict[Phase, int]:
    return capacity(nodes, {kind: spec.bundle(kind) for kind in Phase}, UNLIMITED)


def test_the_example_job_fits_the_example_cluster() -> None:
    cluster = load_yaml(EXAMPLES / "cluster.yaml", ServeSpec)
    _, job = read_job(EXAMPLES / "job.yaml")
    assert cluster.ray is not None
    job.to_job(cluster.pools.to_pools())
    assert job.num_ranks == job.num_nodes * cluster.ray.rollout["GPU"]


def test_kuberays_workers_hold_the_nodes_of_its_cluster_file() -> None:
    documents = list(yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text()))
    kinds = {each["kind"]: each for each in documents}
    content = yaml.safe_load(kinds["ConfigMap"]["data"]["cluster.yaml"])
    spec = parse_config(content, ServeSpec, "kuberay.yaml").ray
    assert spec is not None
    workers = kinds["RayCluster"]["spec"]["workerGroupSpecs"]
    nodes = [node for each in workers for node in each["replicas"] * [ray_node(each)]]
    replicas = {each["groupName"]: each["replicas"] for each in workers}
    assert held(spec, nodes) == {kind: replicas[kind] for kind in Phase}


def test_kuberays_head_keeps_its_state_where_its_scheduler_keeps_the_jobs() -> None:
    kinds = {each["kind"]: each for each in yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())}
    [scheduler] = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    address = kinds["RayCluster"]["spec"]["gcsFaultToleranceOptions"]["redisAddress"]
    channel = next(each["value"] for each in scheduler["env"] if each["name"] == "ROSE_CHANNEL")
    assert address in channel
    assert f"{kinds['RayCluster']['metadata']['name']}-head-svc:6379" in scheduler["args"][0]


def ray_node(worker: dict[str, Any]) -> dict[str, float]:
    """What KubeRay tells `ray start` of a worker: its limits and its parameters."""
    [container] = worker["template"]["spec"]["containers"]
    params = worker["rayStartParams"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == params["num-gpus"]
    custom = json.loads(json.loads(params["resources"]))
    return {"CPU": float(container["resources"]["limits"]["cpu"]), "GPU": float(params["num-gpus"]), **custom}


@pytest.mark.parametrize("name", ["hosts.sh", "slurm.sbatch"])
def test_the_scripts_are_valid_and_offer_what_the_cluster_file_asks_for(name: str) -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / name)], check=True)
    text = (EXAMPLES / name).read_text()
    spec = load_yaml(EXAMPLES / "cluster.yaml", ServeSpec).ray
    assert spec is not None
    for custom in ({*spec.rollout} | {*spec.train}) - {"GPU", "CPU"}:
        assert custom in text
    assert f"--num-gpus {spec.rollout['GPU']:g}" in text


def test_pools_that_want_the_same_devices_share_them_equally() -> None:
    spec = RayClusterSpec(rollout={"GPU": 1}, train={"GPU": 2})
    assert held(spec, [{"GPU": 8.0}]) == {Phase.ROLLOUT: 4, Phase.TRAIN: 2}
    assert held(spec, [{"GPU": 2.0}, {"GPU": 1.0}]) == {Phase.ROLLOUT: 1, Phase.TRAIN: 1}


def test_no_more_nodes_are_offered_than_the_pools_have() -> None:
    spec = RayClusterSpec(rollout={"GPU": 1}, train={"GPU": 1})
    limits: dict[Phase, int | None] = {Phase.ROLLOUT: 1, Phase.TRAIN: None}
    found = capacity([{"GPU": 8.0}], {kind: spec.bundle(kind) for kind in Phase}, limits)
    assert found == {Phase.ROLLOUT: 1, Phase.TRAIN: 7}
