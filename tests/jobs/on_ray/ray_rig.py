"""A Ray cluster of several nodes on this machine, and schedulers that use it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from served_cluster import ServedCluster

JOB = Path(__file__).with_name("ranked_job.py")
STORE_BYTES = 80 << 20
NUM_WORKERS = 3


class RayRig:
    """A head without devices, and workers with two devices each."""

    def __init__(self, run_dir: Path) -> None:
        """run_dir: the runtime directory of what Ray's workers start."""
        self.cluster = Cluster()
        self._inherited = {
            "ROSE_RUNTIME_DIR": str(run_dir),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self._add(num_cpus=2, include_dashboard=False)
        self.workers: list[Any] = []
        for _ in range(NUM_WORKERS):
            self.add_worker()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_worker(self) -> None:
        self.workers.append(self._add(num_cpus=8, num_gpus=2))

    def kill(self, node: Any) -> None:
        """Ends the node as a power failure of its host would."""
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def _add(self, **arguments: Any) -> Any:
        """Tries it again on a busy machine: Ray gives a node 30 s to start, which no setting changes.

        A node inherits this process's environment, which other tests must find unchanged.
        """
        for attempts_left in reversed(range(4)):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in self._inherited.items():
                    patch.setenv(name, value)
                try:
                    return self.cluster.add_node(wait=False, object_store_memory=STORE_BYTES, **arguments)
                except Exception as error:  # Ray has no type for it
                    if attempts_left == 0 or "imed out" not in str(error):
                        raise
        raise AssertionError


class OnRay(ServedCluster):
    """`rose sched serve` on a Ray cluster, with jobs of two ranks."""

    def __init__(self, folder: Path, address: str, **ray: Any) -> None:
        nodes = {"rollout": {"GPU": 1, "CPU": 1}, "train": {"GPU": 1, "CPU": 1}}
        super().__init__(folder, policy="solo", groups={}, ray={"address": address, **nodes, **ray})

    def spec(self, name: str, **fields: Any) -> dict[str, Any]:
        phases = {"rollout": {"seconds": 0.05}, "train": {"seconds": 0.05}}
        command = [sys.executable, str(JOB), str(self.folder)]
        ranks = {"launch": "per-rank", "num_ranks": 2, "placement": "strict-spread"}
        base = {"name": name, "command": command, "phases": phases, "slo": 100.0, **ranks}
        return {**base, "iterations": 5, "max_tokens": 1024, "max_restarts": 0, **fields}

    def notes(self, job: str, key: str) -> list[dict[str, Any]]:
        path = self.folder / "notes.jsonl"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [each for each in map(json.loads, lines) if each["job"] == job and key in each]


def ray_nodes(job: dict[str, Any]) -> set[str]:
    """The Ray nodes that a job's status names, by the beginnings of their ids."""
    return {place.partition("Ray node ")[2][:8] for place in job["places"] if "Ray node" in place}
