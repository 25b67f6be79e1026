"""Jobs of several processes under `rose sched serve`: FSDP jobs that share nodes, against each alone."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fsdp_job import NUM_ITERATIONS, NUM_RANKS
from served_cluster import PATIENCE_S, ServedCluster, overlap

JOB = Path(__file__).with_name("fsdp_job.py")


@pytest.mark.slow
def test_two_fsdp_jobs_alternate_and_end_with_the_weights_of_each_alone(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    subprocess.run([sys.executable, str(JOB), str(alone), "a", "b"], check=True, timeout=PATIENCE_S)
    with ServedCluster(tmp_path) as cluster:
        for name in "ab":
            command = [sys.executable, str(JOB), str(tmp_path), name]
            cluster.submit(
                name, command=command, num_ranks=NUM_RANKS, iterations=NUM_ITERATIONS, train_gb=1e-3
            )
        for name in "ab":
            cluster.wait_state(name, "done")
        phases = cluster.phases()
    assert len(phases) == 2 * 2 * NUM_RANKS * NUM_ITERATIONS
    assert [pair for pair in overlap(phases) if pair[0]["job"] != pair[1]["job"]] == []
    for name in "ab":
        for rank in range(NUM_RANKS):
            kept, expected = (np.load(folder / f"{name}-{rank}.npz") for folder in (tmp_path, alone))
            assert len(kept.files) == 4
            for each in kept.files:
                assert kept[each].tobytes() == expected[each].tobytes(), (name, rank, each)


def test_a_job_that_forks_ranks_without_telling_is_refused(tmp_path: Path) -> None:
    program = (
        "import os; os.environ.update(RANK='1', WORLD_SIZE='2'); import rose; rose.phase('rollout')(print)()"
    )
    with ServedCluster(tmp_path) as cluster:
        cluster.submit("a", command=[sys.executable, "-c", program], max_restarts=0)
        cluster.wait_state("a", "failed")
        log = Path(cluster.job("a")["log"]).read_text()
    assert "job a: its file says num_ranks: 1, WORLD_SIZE is 2; set num_ranks: 2 in it, or start" in log
