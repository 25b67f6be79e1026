"""A profile's run: one job alone on this machine, under a scheduler of its own, watched until its end.

The job runs as under `rose sched serve`, with permits, working sets and a process group. All processes have
ended when `measure` returns or raises, and the job's log is kept.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rose.config import Settings
from rose.errors import ConfigError, ProfileError
from rose.jobs.runner import HostEngine, Runner
from rose.jobs.serve import START_S, ScheduledNode, cache_root, joined
from rose.node.processes import LOG_TAIL_LINES
from rose.node.watcher import group_members
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.messages import Answer, Status, Submit
from rose.scheduler.runtime.job.profile import (
    JobProfile,
    MemorySample,
    check_phases,
    cluster_of,
    profile_of,
    to_be_profiled,
)
from rose.scheduler.runtime.job.recording import Recording, read_recording
from rose.scheduler.runtime.job.spec import RunSpec

GROUP = "profile"
LOOK_S = 0.2
"""The time between two looks at the job and its memory."""


def measure(spec: RunSpec, num_iterations: int, *, timeout_s: float, settings: Settings) -> JobProfile:
    """Runs the job in `spec.folder`. Raises: ProfileError with the end of its log."""
    log = settings.make_runtime_dir() / "logs" / f"profile-{spec.name}.log"
    log.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rose-profile-") as name:
        folder = Path(name)
        channel = f"unix:{folder / 'channel'}"
        cluster = folder / "cluster.yaml"
        cluster.write_text(yaml.safe_dump(cluster_of(spec, GROUP)))
        recording = Recording(forced_tokens=spec.max_tokens, path=str(folder / "phases.jsonl"))
        node = ScheduledNode(channel, cluster, folder / "scheduler.log")
        node.start()
        try:
            with ControlClient(joined(channel), START_S) as client:
                node.wait_ready(client)
                engine = HostEngine(channel, folder, cache_root(settings, channel), recording=recording)
                with closing(Runner(client, engine)) as runner:
                    run = _Run(spec, num_iterations, node, client, runner, Path(recording.path), log)
                    return run.to_the_end(timeout_s)
        finally:
            node.stop()
            job_log = folder / "logs" / f"{spec.name}.log"
            if job_log.exists():
                shutil.move(job_log, log)


@dataclass(slots=True)
class _Run:
    """One run of the job, watched."""

    spec: RunSpec
    num_iterations: int
    node: ScheduledNode
    client: ControlClient
    runner: Runner
    recording: Path
    log: Path
    """Where the job's log is kept after the run."""
    samples: list[MemorySample] = field(default_factory=list)

    def to_the_end(self, timeout_s: float) -> JobProfile:
        deadline = time.monotonic() + timeout_s
        spec = to_be_profiled(self.spec, self.num_iterations, GROUP)
        reply = self.client.ask(Submit(seq=self.client.next_seq(), spec=spec), START_S)
        assert isinstance(reply, Answer), reply
        if reply.error is not None:
            raise ConfigError(reply.error)
        job = self._look()
        while not job["is_over"]:
            if time.monotonic() >= deadline:
                raise ProfileError(self._too_late(job, timeout_s) + _end_of(job["log"], self.log))
            self._serve(min(deadline, time.monotonic() + LOOK_S))
            job = self._look()
        recorded = read_recording(self.recording)
        if job["state"] != "done":
            hint = "" if recorded.began else "; it entered no phase: are its functions under @rose.phase?"
            raise ProfileError(f"{self.spec.name}: {job['note']}{hint}" + _end_of(job["log"], self.log))
        return profile_of(self.spec, recorded, self.samples)

    def _serve(self, until_s: float) -> None:
        self.node.check()
        while time.monotonic() < until_s:
            self.runner.step()

    def _look(self) -> dict[str, Any]:
        """Samples the job's memory, checks its phases, and returns the job's status."""
        pid = self.runner.pid_of(self.spec.name)
        if pid is not None:
            self.samples.append(MemorySample(at_s=time.monotonic(), resident_bytes=resident_bytes(pid)))
        check_phases(self.spec, read_recording(self.recording))
        reply = self.client.ask(Status(seq=self.client.next_seq(), job=self.spec.name), START_S)
        assert isinstance(reply, Answer) and reply.error is None, reply
        job: dict[str, Any] = reply.body["jobs"][0]
        return job

    def _too_late(self, job: Mapping[str, Any], timeout_s: float) -> str:
        phase = f"in {job['holds']}" if job["holds"] is not None else "between two phases"
        done, total = job["iterations"]
        return (
            f"{self.spec.name}: not done after {timeout_s:g} s, {done} of {total} iterations, now {phase}; "
            "give it a larger --timeout-s, or fewer --iterations"
        )


def resident_bytes(leader_pid: int) -> int:
    """Returns the resident memory of all processes of a group; shared pages count in each of them."""
    num_pages = 0
    for pid in group_members(leader_pid):
        try:
            num_pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):  # it ended while we looked
            continue
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def _end_of(path: str, kept: Path) -> str:
    """Returns the last lines of a job's log, under the path at which it is kept."""
    log = Path(path)
    if not log.exists():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return f"; end of {kept}:\n" + "\n".join(lines)
