"""Jobs of several processes under `rose sched serve`: FSDP jobs that share nodes, against each alone."""

import subprocess
import sys
from pathlib import Path

import bench_ranks
import numpy as np
import pytest
from fsdp_job import NUM_ITERATIONS, NUM_RANKS
from served_cluster import PATIENCE_S, ServedCluster, kill, overlap, wait_until
from sim.ranks.jobs import RankedJobs

JOB = Path(__file__).with_name("fsdp_job.py")
FORKING_JOB = Path(__file__).with_name("forking_job.py")


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


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_job_goes_on_behind_its_last_iteration(tmp_path: Path) -> None:
    with ServedCluster(tmp_path, lease_s=5.0) as cluster:
        (tmp_path / "hold-a").touch()
        command = [sys.executable, str(FORKING_JOB), str(tmp_path), "0.05", "0.05"]
        cluster.submit("a", command=command, num_ranks=2)
        wait_until(lambda: cluster.job("a")["holds"] == "train", "its training")
        kill(int((tmp_path / "rank-1").read_text()))
        wait_until(lambda: cluster.job("a")["restarts"] == 1, "its second attempt")
        note = cluster.job("a")["note"]
        assert note.endswith(": rank 1 fell silent in train of iteration 0")
        (tmp_path / "hold-a").unlink()
        assert cluster.wait_state("a", "done")["iterations"] == [3, 3]
        assert len(cluster.phases("a")) == 2 * (1 + 2 * 3), "both ranks: a rollout, then all of it"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_rank_runs_beside_another_job_whoever_is_killed(num_ranks: int) -> None:
    specs = [bench_ranks.spec(name, 3.0, num_ranks=num_ranks) for name in "abc"]
    seen = RankedJobs(specs, seed=num_ranks, shortest=0.3).run(num_phases=300, kill_every_s=20.0)
    assert seen.overlaps == [] and len(seen.kills) == 3


@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.6])
def test_no_iteration_is_longer_than_certified_because_of_a_checkpoint(
    share: float, is_declared: bool
) -> None:
    late = bench_ranks.late(share, is_declared, num_iterations=20, seed=0)
    assert len(late) > 10 and not any(late[0 if is_declared else bench_ranks.NUM_TO_DRIFT :])


PROGRAMS = {
    "has-another-phase": (
        "import rose; rose.phase('trian')(print)()",
        "no phase 'trian' in its file, which has rollout, train; add it",
    ),
    "forks-ranks": (
        "import os; os.environ.update(RANK='1', WORLD_SIZE='2'); import rose; rose.phase('rollout')(print)()",
        "its file says num_ranks: 1, WORLD_SIZE is 2; set num_ranks: 2 in it, or start",
    ),
    "has-no-phase": (
        "import rose; rose.runtime_hook(print)()",
        "iteration 0 entered neither rollout nor train, and so held no node; mark these functions",
    ),
}


@pytest.mark.slow
def test_a_program_that_does_not_do_what_its_file_says_is_refused(tmp_path: Path) -> None:
    with ServedCluster(tmp_path) as cluster:
        for name, (program, _) in PROGRAMS.items():
            cluster.submit(name, command=[sys.executable, "-c", program], max_restarts=0)
        for name, (_, said) in PROGRAMS.items():
            cluster.wait_state(name, "failed")
            assert f"job {name}: {said}" in Path(cluster.job(name)["log"]).read_text()
