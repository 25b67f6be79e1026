"""A Ray node that is killed costs its job a few seconds and the job's own start, and other jobs nothing.

`rose sched serve` on a Ray cluster of one head and three workers on this machine. Two jobs use a worker each.
The first job's worker is killed by SIGKILL, with all its processes, and the third worker is free for the job.
Ray checks its nodes every 0.5 s, as in examples/jobs-on-ray.

  ray_node_kill_s[restart]    from the kill until the job's process has been started on another node
  ray_node_kill_s[own start]  from then until its first phase: Python and the program's imports
  ray_node_kill_s[others]     the other job's longest time between two phases from the kill on, over the
                              longest of equally many before it
  jobs_lost                   jobs that did not go on

    python benchmarks/bench_ray_kill.py --json ray_kill.json
"""

import argparse
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from lib.cluster.rig import JOB, ClusterRig
from lib.harness import median_figure, run_benchmark

from rose.errors import WorkerError, install_hint
from rose.measure.figures import Figure
from rose.scheduler.runtime.channel.messages import Cancel

if TYPE_CHECKING:
    from lib.cluster.ray_rig import RayRig

PATIENCE_S = 180.0
NUM_SEEN = 20
"""Phases of the other job before a kill."""
PHASE_S = 0.1


def measure(args: argparse.Namespace) -> list[Figure]:
    if find_spec("ray") is None:
        raise WorkerError(f"Ray is not installed; {install_hint('ray')}")
    from lib.cluster.ray_rig import RayRig  # loads Ray

    num_kills = 1 if args.quick else 5
    with tempfile.TemporaryDirectory(prefix="rose-ray-kill-") as folder:
        nodes = RayRig(Path(folder), num_workers=3)
        try:
            return _figures(nodes, num_kills)
        finally:
            nodes.cluster.shutdown()


def _figures(nodes: "RayRig", num_kills: int) -> list[Figure]:
    bundle = {"GPU": 1, "CPU": 1}
    with ClusterRig(0, 0, ray={"address": nodes.address, "rollout": bundle, "train": bundle}) as rig:
        for name in ("killed", "other"):
            rig.submit_spec(_spec(name, rig.log))
        kills = [_kill(nodes, rig) for _ in range(num_kills)]
        jobs = {each["name"]: each for each in rig.status()["jobs"]}
        num_lost = sum(each["state"] != "running" for each in jobs.values()) + jobs["other"]["restarts"]
        for name in jobs:
            rig.client.ask(Cancel(seq=rig.client.next_seq(), job=name), PATIENCE_S)
        rig.wait_until(lambda: all(each["is_over"] for each in rig.status()["jobs"]), "end", PATIENCE_S)
    restarts, starts, others = zip(*kills, strict=True)
    return [
        median_figure("ray_node_kill_s[restart]", restarts, "s", target="<= 5"),
        median_figure("ray_node_kill_s[own start]", starts, "s"),
        median_figure("ray_node_kill_s[others]", others, "s", target="<= 0.1"),
        Figure(name="jobs_lost", value=num_lost, unit="jobs", target="<= 0"),
    ]


def _spec(name: str, log: Path) -> dict[str, Any]:
    return {
        "name": name,
        "command": [sys.executable, str(JOB), str(log), str(PHASE_S), str(PHASE_S)],
        "phases": {"rollout": {"seconds": PHASE_S}, "train": {"seconds": PHASE_S}},
        "placement": "strict-pack",
        "iterations": 1_000_000,
        "max_tokens": 1024,
        "slo": 100.0,
    }


def _kill(nodes: "RayRig", rig: ClusterRig) -> tuple[float, float, float]:
    """Returns how long the killed job's restart and its own start took, and what the other job lost."""
    for name in ("killed", "other"):
        _wait_for_phases(rig, name)
    [job] = [each for each in rig.status()["jobs"] if each["name"] == "killed"]
    [ray_node] = {place.partition("Ray node ")[2][:8] for place in job["places"]}
    [node] = [each for each in nodes.workers if each.node_id.startswith(ray_node)]
    killed_at, killed_s = time.time(), time.monotonic()
    nodes.kill(node)
    old = {each["pid"] for each in _begins(rig, "killed")}

    def new_begins() -> list[dict[str, Any]]:
        return [each for each in _begins(rig, "killed") if each["pid"] not in old]

    rig.wait_until(lambda: bool(new_begins()), "restart", PATIENCE_S)
    begin = new_begins()[0]
    restart_s = psutil.Process(begin["pid"]).create_time() - killed_at
    nodes.add_worker()
    return restart_s, begin["at_s"] - killed_s - restart_s, _lost_s(rig, "other", killed_s)


def _wait_for_phases(rig: ClusterRig, job: str) -> None:
    num = len(_begins(rig, job)) + NUM_SEEN
    rig.wait_until(lambda: len(_begins(rig, job)) >= num, f"phases of {job}", PATIENCE_S)


def _lost_s(rig: ClusterRig, job: str, killed_s: float) -> float:
    times_s = [float(each["at_s"]) for each in _begins(rig, job)]
    gaps = [(after, after - first) for first, after in pairwise(times_s)]
    later = [gap for at_s, gap in gaps if at_s >= killed_s]
    before = [gap for at_s, gap in gaps if at_s < killed_s][-max(NUM_SEEN, len(later)) :]
    return max(0.0, max(later) - max(before))


def _begins(rig: ClusterRig, job: str) -> list[dict[str, Any]]:
    return [each for each in rig.notes() if each["job"] == job and each["what"] == "begin"]


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, measure))
