"""Jobs with a Ray instance of their own, under a real scheduler."""

import json
import sys
from pathlib import Path

import pytest
from served_cluster import ServedCluster, wait_until

from tests.commands import in_sessions

pytest.importorskip("ray", reason="Ray is not installed")

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("ray_using_job.py")
RAY = {"num_cpus": 2, "object_store_gb": 0.08}


def test_each_job_has_a_ray_of_its_own_that_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As Ray leaves it to a user who once began a cluster with ray.init(): `ray start` then asks for it, and a
    # client that is given an address sends none.
    token = tmp_path / "home" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text("0" * 64)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with ServedCluster(tmp_path) as cluster:
        command = [sys.executable, str(PROGRAM), str(tmp_path), str(RAY["num_cpus"])]
        for name in ("a", "b"):
            assert cluster.submit(name, command=command, iterations=2, ray=RAY).error is None
        notes = {}
        for name in ("a", "b"):
            assert cluster.wait_state(name, "done")["restarts"] == 0
            lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
            notes[name] = [json.loads(line) for line in lines]
        sessions = [lines[0]["session"] for lines in notes.values()]
        wait_until(lambda: not in_sessions(set(sessions)), "all processes of both jobs to end")
    assert [[line["iteration"] for line in lines] for lines in notes.values()] == [[0, 1], [0, 1]]
    assert len({line["address"] for lines in notes.values() for line in lines}) == 2
    assert len(set(sessions)) == 2


def test_a_command_that_fails_beside_its_ray_fails_the_job(tmp_path: Path) -> None:
    with ServedCluster(tmp_path) as cluster:
        command = [sys.executable, "-c", "raise SystemExit(3)"]
        assert cluster.submit("a", command=command, max_restarts=0, ray=RAY).error is None
        assert "status 3" in cluster.wait_state("a", "failed")["note"]
