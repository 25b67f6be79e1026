"""What the processes of a job on one host are told."""

import fcntl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rose.jobs.cache_folder import CacheFolder
from rose.jobs.ranks import START_FAILED_STATUS, Attempt, LocalAttempt, limit_bytes, own_bytes, remove
from rose.jobs.runner import HostEngine
from rose.scheduler.cluster.spec import PhaseSpec
from rose.scheduler.runtime.channel.messages import Start
from rose.scheduler.runtime.job.job import JobFile, JobNode
from rose.scheduler.runtime.job.spec import RunSpec


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


def test_jobs_of_one_name_of_two_schedulers_have_their_own_files(tmp_path: Path) -> None:
    """Both schedulers have the same folder, as by default."""
    engines = [
        HostEngine(f"unix:{tmp_path / name}", tmp_path, tmp_path / "cache" / name) for name in ("one", "two")
    ]
    spec = job_spec(["sleep", "60"])
    attempts = [engine.start(spec, start_order(spec), None) for engine in engines]
    try:
        files = [job_file_of(attempt) for attempt in attempts]
        assert [JobFile.read(file).channel for file in files] == [
            f"unix:{tmp_path / 'one'}",
            f"unix:{tmp_path / 'two'}",
        ]
        assert engines[0].log_folder != engines[1].log_folder
        assert all((engine.log_folder / "math.log").exists() for engine in engines)
        engines[1].forget(spec.name)
        engines[1].close()
        assert JobFile.read(files[0]).channel == f"unix:{tmp_path / 'one'}"
    finally:
        for attempt in attempts:
            attempt.end(0.0)
            while attempt.ended() is None:
                time.sleep(0.01)


def test_a_job_that_can_t_be_told_anything_ends_alone(tmp_path: Path) -> None:
    """Its runner goes on, and with it all other jobs. A file in the place of the folder stands for a full
    disk."""
    engine = HostEngine(f"unix:{tmp_path}", tmp_path, tmp_path / "cache")
    spec = job_spec(["true"])
    (tmp_path / "jobs").write_text("")
    ended = engine.start(spec, start_order(spec), None).ended()
    assert ended is not None and ended.exit_status == START_FAILED_STATUS and ended.cannot_start is None
    assert ended.why is not None and "Not a directory" in ended.why
    (tmp_path / "jobs").unlink()
    (engine.log_folder / "math.log").mkdir(parents=True)  # so its log can't be opened
    ended = engine.start(spec, start_order(spec), None).ended()
    assert ended is not None and ended.exit_status == START_FAILED_STATUS and ended.cannot_start is None


def test_a_jobs_own_memory_is_without_its_copies_in_shared_memory() -> None:
    program = (
        "import mmap, time; copy = mmap.mmap(-1, 96 << 20); copy.write(bytes(96 << 20))\n"
        "own = bytearray(b'x') * (32 << 20); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"1\n"
            assert 32 << 20 < own_bytes(process.pid) < 80 << 20
        finally:
            process.kill()


def job_spec(command: list[str]) -> RunSpec:
    phase = {"nodes": 1, "seconds": 1.0, "memory_gb": 1.0}
    job = {"name": "math", "command": command, "folder": "/tmp", "iterations": 2, "max_tokens": 8, "slo": 2.0}
    return RunSpec.model_validate({**job, "phases": {"rollout": phase, "train": phase}})


def start_order(spec: RunSpec) -> Start:
    return Start(
        job=spec.name,
        attempt=1,
        spec=spec.model_dump(mode="json"),
        first_iteration=0,
        group="main",
        rollout_nodes=[0],
        num_train_nodes=1,
        variables={},
    )


def job_file_of(attempt: Attempt) -> Path:
    """Returns the file that the attempt's process is told of."""
    assert isinstance(attempt, LocalAttempt)
    variables = Path(f"/proc/{attempt.pid}/environ").read_bytes().split(b"\0")
    [found] = [each for each in variables if each.startswith(b"ROSE_JOB=")]
    return Path(found.partition(b"=")[2].decode())


HOLDS_A_SET = """
import sys, time
from pathlib import Path
from rose.jobs.cache_folder import CacheFolder
(CacheFolder(Path(sys.argv[1])).path / "math").mkdir()
print("holds", flush=True)
time.sleep(600)
"""


def test_memory_that_a_killed_runner_has_left_is_freed_by_the_next_one_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "of-ray" / "math").mkdir(parents=True)
    folders = [tmp_path / "killed", tmp_path / "lives"]
    command = [sys.executable, "-c", HOLDS_A_SET]
    runners = [subprocess.Popen([*command, str(each)], stdout=subprocess.PIPE) for each in folders]
    try:
        for runner in runners:
            assert runner.stdout is not None and runner.stdout.readline() == b"holds\n"
        runners[0].kill()
        runners[0].wait()
        next_one = CacheFolder(tmp_path / "next")
        assert sorted(each.name for each in tmp_path.iterdir()) == ["lives", "next", "of-ray"]
        assert (folders[1] / "math").is_dir()
        next_one.close()
        assert not next_one.path.exists()
    finally:
        for runner in runners:
            runner.kill()
            runner.communicate()


def test_a_folder_that_another_runner_removes_while_it_is_locked_is_made_again(tmp_path: Path) -> None:
    """Else nothing would free it once this runner was killed."""
    file = tmp_path / "own" / ".lock"
    file.parent.mkdir()
    with file.open("w") as other, ThreadPoolExecutor(1) as threads:
        fcntl.flock(other, fcntl.LOCK_EX)
        made = threads.submit(CacheFolder, file.parent)
        waiting = f":{file.stat().st_ino} "
        while not any(
            "->" in line and waiting in line for line in Path("/proc/locks").read_text().splitlines()
        ):
            time.sleep(0.01)
        remove(file.parent)
        fcntl.flock(other, fcntl.LOCK_UN)
        folder = made.result(60.0)
    assert file.exists()
    folder.close()
