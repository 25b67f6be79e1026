"""Schedulers that use a Ray cluster of several nodes on this machine."""

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
from served_cluster import ServedCluster, wait_until

from rose.jobs.on_ray.cluster import NAMESPACE, channel_root
from rose.node.processes import ServerProcess
from rose.scheduler.runtime.channel.messages import Cancel

JOB = Path(__file__).with_name("ranked_job.py")
HEADLESS_S = 30
"""Ray's processes in the shared cluster do without their head for so long, and a scheduler for half of it. By
default it is a minute."""


class OnRay(ServedCluster):
    """`rose sched serve` on a Ray cluster, with jobs of two ranks. They end with the test."""

    def __init__(
        self, folder: Path, address: str, *, cluster: Mapping[str, Any] | None = None, **ray: Any
    ) -> None:
        """cluster, ray: more of the cluster's file, and of its `ray`."""
        self._address = address
        nodes = {"rollout": {"GPU": 1, "CPU": 1}, "train": {"GPU": 1, "CPU": 1}}
        file = {"policy": "solo", "groups": {}, "ray": {"address": address, **nodes, **ray}}
        super().__init__(folder, **{**file, **(cluster if cluster is not None else {})})

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        host, _, port = self._address.rpartition(":")
        with contextlib.suppress(OSError):  # it is gone, and all that ran there
            socket.create_connection((host, int(port))).close()
            self._end_jobs()

    def kill(self) -> None:
        """Ends `rose sched serve` and the scheduler as a power failure of their host would."""
        scheduler = psutil.Process(self.status()["scheduler_pid"])
        for pid in (self.server.pid, scheduler.pid):
            os.kill(pid, signal.SIGKILL)
        self.server.stop(0.0)
        wait_until(lambda: not scheduler.is_running(), "the scheduler's end")

    def start_again(self) -> None:
        """Starts `rose sched serve` after `kill`."""
        self.server = ServerProcess(self.argv, "sched", self.folder / "sched.log", env=self.environment)
        self.server.start()

    def _end_jobs(self) -> None:
        """Ends what goes on without its scheduler."""
        root = channel_root(self.url)
        ray.init(address=self._address, namespace=f"{NAMESPACE}-{root}", log_to_driver=False)
        try:
            for name in ray.util.list_named_actors():
                with contextlib.suppress(ValueError):  # it has ended
                    ray.kill(ray.get_actor(name))
            for table in ray.util.placement_group_table().values():
                if table["name"].startswith(f"{root}/") and table["state"] != "REMOVED":
                    ray.util.remove_placement_group(ray.util.get_placement_group(table["name"]))
        finally:
            ray.shutdown()

    def end_jobs(self) -> None:
        """Ends the jobs of a test that leaves the server to others."""
        jobs = [name for name, job in self.status()["jobs"].items() if not job["is_over"]]
        for name in jobs:
            self.ask(Cancel, job=name)
        wait_until(lambda: all(self.job(name)["is_over"] for name in jobs), "the ends of the jobs")

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
