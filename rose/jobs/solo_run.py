"""A profile's run: one job alone, under a scheduler of its own, watched until its end.

The job runs as under `rose sched serve`, with permits, working sets and a process group. All processes have
ended when `measure` returns or raises, and the job's log is kept.
"""

import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rose.config import Settings
from rose.errors import ConfigError, ProfileError
from rose.jobs.ranks import own_bytes
from rose.jobs.runner import Engine, HostEngine, Runner, job_logs
from rose.jobs.serve import START_S, ScheduledNode, cache_root, joined
from rose.node.processes import LOG_TAIL_LINES
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.messages import Answer, Status, Submit
from rose.scheduler.runtime.channel.redis_streams import remove_channel
from rose.scheduler.runtime.job.profile import (
    JobProfile,
    MemorySample,
    check_phases,
    cluster_of,
    profile_of,
    to_be_profiled,
)
from rose.scheduler.runtime.job.recording import Recording, read_recording
from rose.scheduler.runtime.job.spec import RayClusterSpec, RunSpec, ServeSpec

GROUP = "profile"
LOOK_S = 0.2
"""The time between two looks at the job and its memory."""


def measure(
    spec: RunSpec,
    num_iterations: int,
    *,
    timeout_s: float,
    settings: Settings,
    ray: RayClusterSpec | None = None,
    redis: str | None = None,
) -> JobProfile:
    """Runs the job in `spec.folder`. Raises: ProfileError with the end of its log.

    ray: the Ray cluster to run it on; None: this machine. redis: the Redis of the job's channel, which a Ray
    cluster of several hosts needs.
    """
    log = settings.make_runtime_dir() / "logs" / f"profile-{spec.name}.log"
    log.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rose-profile-") as name:
        folder = Path(name)
        channel = _own_channel(redis) if redis is not None else f"unix:{folder / 'channel'}"
        cluster = folder / "cluster.yaml"
        cluster.write_text(yaml.safe_dump(cluster_of(spec, GROUP, ray)))
        recording = Recording(
            forced_tokens=spec.max_tokens,
            path=str(folder / "phases.jsonl"),
            times_engines=spec.tail is None and spec.phases["rollout"].nodes > 1,
        )
        node = ScheduledNode(channel, cluster, folder / "scheduler.log")
        node.start()
        try:
            with ControlClient(joined(channel), START_S) as client:
                node.wait_ready(client)
                samples: list[MemorySample] = []
                engine = (
                    HostEngine(channel, folder, cache_root(settings, channel), recording=recording)
                    if ray is None
                    else _ray_engine(ServeSpec(ray=ray), channel, folder, recording, samples)
                )
                with closing(Runner(client, engine)) as runner:
                    watched = _Watched(node, client, runner, engine)
                    run = _Run(spec, num_iterations, watched, Path(recording.path), log, samples)
                    return run.to_the_end(timeout_s)
        finally:
            node.stop()
            if redis is not None:
                remove_channel(channel)
            job_log = job_logs(folder, cache_root(settings, channel).name) / f"{spec.name}.log"
            if job_log.exists():
                shutil.move(job_log, log)


def _own_channel(redis: str) -> str:
    return f"{redis}{'&' if '?' in redis else '?'}channel=profile-{uuid.uuid4().hex[:8]}"


def _ray_engine(
    cluster: ServeSpec, channel: str, folder: Path, recording: Recording, samples: list[MemorySample]
) -> Engine:
    from rose.jobs.on_ray.engine import RayEngine  # loads Ray
    from rose.jobs.on_ray.measured import RayRecording

    return RayEngine(cluster, channel, folder, RayRecording(recording, samples))


class _Watched(NamedTuple):
    """What the run has started."""

    node: ScheduledNode
    client: ControlClient
    runner: Runner
    engine: Engine


@dataclass(slots=True)
class _Run:
    """One run of the job, watched."""

    spec: RunSpec
    num_iterations: int
    on: _Watched
    recording: Path
    log: Path
    """Where the job's log is kept after the run."""
    samples: list[MemorySample]

    def to_the_end(self, timeout_s: float) -> JobProfile:
        deadline = time.monotonic() + timeout_s
        spec = to_be_profiled(self.spec, self.num_iterations, GROUP)
        reply = self.on.client.ask(Submit(seq=self.on.client.next_seq(), spec=spec), START_S)
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
        self.on.node.check()
        self.on.engine.check()
        while time.monotonic() < until_s:
            self.on.runner.step()

    def _look(self) -> dict[str, Any]:
        """Samples the job's memory, checks its phases, and returns the job's status."""
        if pids := self.on.runner.pids_of(self.spec.name):
            memory = sum(map(own_bytes, pids))
            self.samples.append(MemorySample(at_s=time.monotonic(), own_bytes=memory))
        check_phases(self.spec, read_recording(self.recording))
        reply = self.on.client.ask(Status(seq=self.on.client.next_seq(), job=self.spec.name), START_S)
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


def _end_of(path: str, kept: Path) -> str:
    """Returns the last lines of a job's log, under the path at which it is kept."""
    log = Path(path)
    if not log.exists():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return f"; end of {kept}:\n" + "\n".join(lines)
