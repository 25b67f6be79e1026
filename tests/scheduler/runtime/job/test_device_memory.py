"""A phase whose devices another job's process still fills, with a stand-in for the driver's nvidia-smi."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rose.errors import DeviceMemoryHeld
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import Answer, Granted, Release, Request, decode_call, encode
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.channel.protocol import Batch, Outgoing
from rose.scheduler.runtime.job import device_memory
from rose.scheduler.runtime.job.device_memory import KEPT_BYTES, holders, wait_free
from rose.scheduler.runtime.job.job import JobFile, JobNode, RunningJob

MIB = 1 << 20


class Driver:
    """What nvidia-smi says, by the ids that it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._said = folder / "said"
        script = folder / "nvidia-smi"
        script.write_text(
            f"#!{sys.executable}\nimport pathlib, sys\n"
            f'path = pathlib.Path("{self._said}-" + sys.argv[1][5:])\n'
            'print(path.read_text() if path.exists() else "", end="")\n'
        )
        script.chmod(0o755)

    def say(self, ids: str, *lines: str) -> None:
        Path(f"{self._said}-{ids}").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return Driver(tmp_path)


def job_file(folder: Path, name: str, **fields: object) -> JobFile:
    base = {"attempt": 1, "first_iteration": 0, "num_iterations": 1, "group": "g", "rollout_nodes": [0]}
    base |= {"channel": f"unix:{folder / 'ch'}", "cache_folder": str(folder / "cache"), "limit_bytes": {}}
    return msgspec.convert({"name": name, **base, **fields}, JobFile)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[int]:
    """The pid of a process that a runner has started for job b."""
    path = tmp_path / "b.json"
    path.write_bytes(msgspec.json.encode(job_file(tmp_path, "b")))
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "ROSE_JOB": str(path)}) as process:
        yield process.pid
        process.kill()


def test_the_holder_is_named_with_what_it_holds(driver: Driver, other: int) -> None:
    driver.say("0,3", f"{other}, 20000", f"{other}, 9000", f"{os.getpid()}, [N/A]")
    with pytest.raises(DeviceMemoryHeld) as caught:
        wait_free("a", "train", ["0", "3"], free_s=0.0)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(
        f"train of job a needs GPU 0, 3, where job b (pid {other}) holds {29000 * MIB / 1e9:.1f} GB; "
    )
    driver.say("0,3", f"{os.getpid()}, 5000", "99999999, 9000")
    with pytest.raises(DeviceMemoryHeld, match=r"where pid \d+ \(.*\) holds 5.2 GB; give"):
        wait_free("a", "train", ["0", "3"], free_s=0.0)


def test_own_processes_and_contexts_that_stay_are_no_holders(driver: Driver, other: int) -> None:
    driver.say("0", f"{other}, 60000")
    wait_free("b", "rollout", ["0"], free_s=0.0)
    driver.say("0", f"{other}, {KEPT_BYTES // MIB}")
    wait_free("a", "rollout", ["0"], free_s=0.0)


def test_a_child_of_the_jobs_program_without_its_environment_is_the_jobs_own(
    driver: Driver, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(msgspec.json.encode(job_file(tmp_path, "a")))
    begins = f"subprocess.Popen({['sleep', '600']}, env={{}})"
    program = f"import subprocess; print({begins}.pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "ROSE_JOB": str(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            driver.say("0", f"{child}, 60000")
            wait_free("a", "rollout", ["0"], free_s=0.0)
            with pytest.raises(DeviceMemoryHeld, match=rf"where job a \(pid {child}\) holds"):
                wait_free("b", "rollout", ["0"], free_s=0.0)
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()


def test_memory_that_is_freed_meanwhile_is_waited_for(driver: Driver, other: int) -> None:
    driver.say("0", f"{other}, 60000")
    later = threading.Timer(0.2, driver.say, ["0"])
    later.start()
    wait_free("a", "rollout", ["0"], free_s=300.0)
    later.join()


def test_a_host_without_the_driver_has_no_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert holders(["0"]) == []


def test_only_bound_devices_of_the_phase_on_this_host_count(tmp_path: Path) -> None:
    nodes = [
        JobNode(name="rollout-0", address="10.0.0.1", devices=("0",)),
        JobNode(name="rollout-1", address="10.0.0.2", devices=("5",)),
        JobNode(name="train-0", address="10.0.0.1", devices=("1", "2")),
    ]
    first, second = (job_file(tmp_path, "a", nodes=nodes, own_node=index) for index in (0, 1))
    assert (first.devices_of(Phase.ROLLOUT), first.devices_of(Phase.TRAIN)) == (["0"], ["1", "2"])
    assert (second.devices_of(Phase.ROLLOUT), second.devices_of(Phase.TRAIN)) == (["5"], [])
    assert job_file(tmp_path, "a").devices_of(Phase.TRAIN) == []


def test_a_phase_does_not_begin_on_held_devices_and_gives_its_permit_back(
    tmp_path: Path, driver: Driver, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "FREE_S", 0.0)
    driver.say("4", f"{other}, 70000")
    nodes = [JobNode(name="rollout-0", address="127.0.0.1", devices=("4",))]
    file = job_file(tmp_path, "a", nodes=nodes)
    side = ChannelUrl.parse(file.channel).serve()
    released: list[int] = []

    def schedule() -> None:
        while not released:
            arrived = side.receive(0.1)
            batch = Batch()
            for each in arrived:
                call = decode_call(each.body)
                reply: Answer | Granted = Answer(seq=call.seq)
                if isinstance(call, Request):
                    grant = {"job": "a", "attempt": 1, "phase": call.phase, "iteration": 0, "epoch": 7}
                    reply = msgspec.convert({"seq": call.seq, "lease_s": 60.0, **grant}, Granted)
                if isinstance(call, Release):
                    released.append(call.epoch)
                batch.outgoing.append(Outgoing(client=each.client, body=encode(reply)))
            side.commit(batch, arrived)

    thread = threading.Thread(target=schedule)
    thread.start()
    try:
        job = RunningJob(file)
        with pytest.raises(DeviceMemoryHeld, match="job b"), job.permit(Phase.ROLLOUT, 0):
            pytest.fail("the phase has begun")
        job._client.close()
    finally:
        thread.join(300)
        side.close()
    assert released == [7]


def test_an_actor_on_the_cluster_of_ray_is_not_taken_for_another_jobs(tmp_path: Path, driver: Driver) -> None:
    title = ["ray::Worker.step", "600"]
    with subprocess.Popen(title, executable=str(shutil.which("sleep"))) as actor:
        try:
            driver.say("GPU-0", f"{actor.pid}, {2 * KEPT_BYTES // MIB}")
            wait_free("a", "rollout", ["GPU-0"], free_s=0.0)
        finally:
            actor.kill()
    with subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            driver.say("GPU-0", f"{stranger.pid}, {2 * KEPT_BYTES // MIB}")
            with pytest.raises(DeviceMemoryHeld, match=f"pid {stranger.pid} .sleep. holds"):
                wait_free("a", "rollout", ["GPU-0"], free_s=0.0)
        finally:
            stranger.kill()
