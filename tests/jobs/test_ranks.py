"""What the processes of a job on one host are told."""

from pathlib import Path

import pytest

from rose.jobs.ranks import limit_bytes
from rose.jobs.runner import HostEngine
from rose.scheduler.cluster.spec import PhaseSpec
from rose.scheduler.runtime.job.job import JobNode


@pytest.mark.parametrize(
    ("here", "num_bytes"),
    [
        (("rollout-0", "train-0"), 3_000_000_000),
        (("rollout-0", "rollout-1", "train-0"), 6_000_000_000),
        (("train-0", "train-1"), 3_000_000_000),
    ],
)
def test_a_host_keeps_as_much_as_the_phases_nodes_on_it_may(here: tuple[str, ...], num_bytes: int) -> None:
    phase = PhaseSpec(nodes=4, seconds=1.0, memory_gb=3.0)
    nodes = [JobNode(name=name, address="127.0.0.1") for name in here]
    assert limit_bytes("rollout", phase, nodes) == num_bytes


@pytest.mark.parametrize(
    ("visible", "num_devices"),
    [("0,2,5", 3), ("GPU-aa", 1), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("1, -1,2", 1)],
)
def test_a_hosts_devices_are_those_that_its_jobs_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, num_devices: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert HostEngine("unix:" + str(tmp_path), tmp_path, tmp_path / "cache").num_devices() == num_devices


def test_all_devices_of_the_driver_count_where_none_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that answers as NVIDIA's does, with a device that is divided (MIG)."""
    program = tmp_path / "nvidia-smi"
    lines = (
        "GPU 0: H200 (UUID: a)",
        "  MIG 1g.18gb Device 0: (UUID: MIG-b)",
        "GPU 1: H200 (UUID: c)",
    )
    program.write_text("#!/bin/sh\ncat <<END\n" + "\n".join(lines) + "\nEND\n")
    program.chmod(0o700)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engine = HostEngine("unix:" + str(tmp_path), tmp_path, tmp_path / "cache")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert engine.num_devices() == 2
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert engine.num_devices() == 0
