"""A cluster on this machine for benchmarks: `rose sched serve`'s process, jobs on it, and their log.

Owns: the processes and a temporary folder. Promises: leaving the ``with`` block ends every one of them.
Never: measures.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from rose.errors import WorkerError
from rose.node.processes import ServerProcess
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.messages import Answer, Status, Submit
from rose.scheduler.runtime.channel.opening import ChannelUrl

JOB = Path(__file__).with_name("phase_job.py")
START_S = 60.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One phase that a job has finished."""

    job: str
    pid: int
    phase: str
    iteration: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RigJob:
    """A job for the rig. ``rollout`` and ``train``: seconds, or work units with ``cpus``."""

    name: str
    rollout: float
    train: float
    num_iterations: int
    rollout_nodes: tuple[int, ...] = (0,)
    num_train_nodes: int = 1
    set_mb: int = 0
    cpus: tuple[int, int] | None = None
    num_permits: int = 0
    """Instead of phases: this many permits asked for and given back at once."""


class ClusterRig:
    """One group of nodes. ``url``: of the channel; None makes an embedded one."""

    def __init__(
        self,
        num_rollout_nodes: int,
        num_train_nodes: int,
        url: str | None = None,
        *,
        ray: Mapping[str, Any] | None = None,
    ) -> None:
        """ray: `ray` of the cluster's file, which then has no group: each job has one of its own."""
        self._folder = tempfile.TemporaryDirectory(prefix="rose-rig-")
        self.path = Path(self._folder.name)
        self.url = url if url is not None else f"unix:{self.path / 'channel'}"
        cluster = self.path / "cluster.yaml"
        nodes = {"num_rollout_nodes": num_rollout_nodes, "num_train_nodes": num_train_nodes}
        content = {"groups": {"main": nodes}} if ray is None else {"policy": "solo", "ray": dict(ray)}
        cluster.write_text(yaml.safe_dump(content))
        self.log = self.path / "phases.jsonl"
        self.log.touch()
        argv = [sys.executable, "-m", "rose.jobs.serve", str(cluster), "--channel", self.url]
        self._server = ServerProcess(
            [*argv, "--folder", str(self.path / "jobs")], "sched", self.path / "sched.log"
        )

    def __enter__(self) -> Self:
        self._server.start()
        try:
            self.client = ControlClient(ChannelUrl.parse(self.url).join("rig"), START_S)
            self.wait_until(lambda: self.scheduler_pid() is not None, "scheduler")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "client"):
            self.client.close()
        self._server.stop()
        self._folder.cleanup()

    def scheduler_pid(self) -> int | None:
        """Returns the process id of the scheduler that answers now."""
        pid = self.status().get("scheduler_pid")
        return int(pid) if pid is not None else None

    def status(self) -> dict[str, Any]:
        """Returns what `rose sched status` prints."""
        return self.ask(Status(seq=self.client.next_seq()))

    def ask(self, call: Status | Submit) -> dict[str, Any]:
        """Raises: WorkerError for what the scheduler refuses."""
        reply = self.client.ask(call, START_S)
        assert isinstance(reply, Answer), reply
        if reply.error is not None:
            raise WorkerError(reply.error)
        return reply.body

    def submit(self, job: RigJob, *, slo: float) -> None:
        """Starts a job."""
        command = [sys.executable, str(JOB), str(self.log), str(job.rollout), str(job.train)]
        command += ["--set-mb", str(job.set_mb)]
        if job.cpus is not None:
            command += ["--cpus", ",".join(map(str, job.cpus))]
        command += ["--num-permits", str(job.num_permits)]
        spec = {
            "name": job.name,
            "command": command,
            "group": "main",
            "rollout_nodes": list(job.rollout_nodes),
            "phases": {
                "rollout": {"seconds": job.rollout, "nodes": len(job.rollout_nodes)},
                "train": {
                    "seconds": job.train,
                    "nodes": job.num_train_nodes,
                    "memory_gb": (job.set_mb << 20) / 1e9,
                },
            },
            "iterations": job.num_iterations,
            "max_tokens": 8192,
            "slo": slo,
        }
        self.submit_spec(spec)

    def submit_spec(self, spec: dict[str, Any]) -> None:
        """Starts a job of another kind, which notes its phases in `log`."""
        self.ask(Submit(seq=self.client.next_seq(), spec=spec))

    def wait_done(self, names: set[str], timeout_s: float) -> None:
        """Waits until these jobs are done. Raises: WorkerError if one fails, or when the time is over."""

        def are_done() -> bool:
            states = {each["name"]: each["state"] for each in self.status()["jobs"]}
            failed = {name: state for name, state in states.items() if state in ("failed", "cancelled")}
            if failed:
                raise WorkerError(f"jobs ended: {failed}; sched's log ends:\n{self._server.log_tail()}")
            return all(states[name] == "done" for name in names)

        self.wait_until(are_done, f"jobs {sorted(names)}", timeout_s)

    def wait_until(self, is_true: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
        """Raises: WorkerError after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() >= deadline:
                raise WorkerError(f"no {what} after {timeout_s:.0f} s:\n{self._server.log_tail()}")
            time.sleep(POLL_S)

    def notes(self) -> list[dict[str, Any]]:
        """Returns all begins and ends of phases so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def phases(self) -> list[PhaseTime]:
        """Returns the finished phases, in the order of their ends."""
        return [
            PhaseTime(
                job=note["job"],
                pid=note["pid"],
                phase=note["phase"],
                iteration=note["iteration"],
                begin_s=note["begin_s"],
                end_s=note["at_s"],
            )
            for note in self.notes()
            if note["what"] == "end"
        ]
