"""Jobs of several ranks that share a group on Ray, while ranks and actors die or stop at random."""

import itertools
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from lib.cluster.ray_rig import RayRig
from served_cluster import kill, wait_until

from tests.jobs.on_ray.ray_rig import OnRay

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("locking_job.py")
JOBS, NUM_RANKS, NUM_ITERATIONS = "ab", 2, 60
FAULTS = ("rank", "actor", "stopped rank")


@pytest.mark.parametrize("seed", [1, 2])
def test_no_rank_is_in_a_phase_beside_another_job_whoever_dies(
    rig: RayRig, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    command = [sys.executable, str(JOB), str(tmp_path), "0.05", *JOBS]
    phases = {"rollout": {"seconds": 0.2}, "train": {"seconds": 0.2}}
    with OnRay(tmp_path, rig.address, cluster={"policy": "lifetime-static", "lease_s": 3.0}) as served:
        for name in JOBS:
            fields: dict[str, Any] = {"command": command, "phases": phases, "iterations": NUM_ITERATIONS}
            fields |= {
                "max_restarts": 99,
                "hung_s": 15.0,
            }  # a stopped rank may have no lease
            assert served.submit(name, placement="spread", **fields).error is None
        assert len({served.job(name)["group"] for name in JOBS}) == 1, "they share the nodes"
        for fault in rng.sample(FAULTS, len(FAULTS)):
            harm_one(served, rng.choice(JOBS), rng.randrange(NUM_RANKS), fault)
        for name in JOBS:
            assert served.wait_state(name, "done")["iterations"] == [NUM_ITERATIONS, NUM_ITERATIONS]
            for rank in range(NUM_RANKS):
                assert_none_is_lost(served, name, rank)
        assert served.notes("a", "beside") == served.notes("b", "beside") == []


def harm_one(served: OnRay, name: str, rank: int, fault: str) -> None:
    """Waits until the job's attempt has run for a while, harms it, and waits for the next attempt."""

    def has_run() -> bool:
        attempt = served.job(name)["attempt"]
        ran = [each for each in served.notes(name, "iteration") if each["attempt"] == attempt]
        return len(ran) >= 4 * NUM_RANKS

    wait_until(has_run, f"{name} to run; {served.server.log_tail()}")
    attempt = served.job(name)["attempt"]
    [pid] = [
        each["pid"]
        for each in served.notes(name, "told")
        if (each["attempt"], each["rank"]) == (attempt, rank)
    ]
    is_harmed = harm(pid, fault)
    wait_until(
        lambda: served.job(name)["attempt"] > attempt, f"{name} after {fault}; {served.server.log_tail()}"
    )
    if not is_harmed:
        harm_one(served, name, rank, fault)


def assert_none_is_lost(served: OnRay, name: str, rank: int) -> None:
    """Only an iteration that an attempt's end has cut short runs twice."""
    own = [
        (each["attempt"], each["iteration"])
        for each in served.notes(name, "iteration")
        if (each["phase"], each["rank"]) == ("train", rank)
    ]
    assert {iteration for _, iteration in own} == set(range(NUM_ITERATIONS))
    for (attempt, last), (later, first) in itertools.pairwise(own):
        assert first == last + 1 or (later > attempt and first == last), own


def harm(pid: int, fault: str) -> bool:
    """Returns False if the rank has ended before: its lease runs out if the machine stands still."""
    try:
        if fault == "stopped rank":
            os.kill(pid, signal.SIGSTOP)  # its lease runs out
            return True
        actor = psutil.Process(pid).parent()
        assert actor is not None
        kill(actor.pid if fault == "actor" else pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False
    return True
