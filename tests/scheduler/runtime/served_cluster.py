"""`rose sched serve` as a process of its own, with jobs that sleep."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import yaml

from rose.node.processes import ServerProcess
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.messages import Answer, AnyCall, Status, Submit
from rose.scheduler.runtime.channel.opening import ChannelUrl
from tests.commands import rose

JOB = Path(__file__).with_name("sleeping_job.py")
PATIENCE_S = 300.0
"""For what takes a second, on a machine that is busy with something else."""


def wait_until(is_true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.02)


class ServedCluster:
    """One group on one channel."""

    def __init__(
        self,
        folder: Path,
        url: str | None = None,
        http: str | None = None,
        **cluster: Any,
    ) -> None:
        """http: where the dashboard listens; None: there is none."""
        self.folder = folder
        self.url = url if url is not None else f"unix:{folder / 'ch'}"
        path = folder / "cluster.yaml"
        path.write_text(yaml.safe_dump({"groups": {"main": {}}, **cluster}))
        self.argv = [sys.executable, "-m", "rose.jobs.serve", str(path), "--channel", self.url]
        self.argv += ["--folder", str(folder / "jobs")]
        self.argv += ["--http", http] if http is not None else []
        self.server = ServerProcess(self.argv, "sched", folder / "sched.log", env=self.environment)
        self._client: ControlClient | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {"ROSE_RUNTIME_DIR": str(self.folder), "ROSE_CHANNEL": self.url}

    @property
    def client(self) -> ControlClient:
        if self._client is None:
            self._client = ControlClient(ChannelUrl.parse(self.url).join("test"), PATIENCE_S)
        return self._client

    def ask(self, kind: type[AnyCall], **fields: Any) -> Answer:
        reply = self.client.ask(kind(seq=self.client.next_seq(), **fields), PATIENCE_S)
        assert isinstance(reply, Answer)
        return reply

    def spec(self, name: str, **fields: Any) -> dict[str, Any]:
        rollout_s, train_s = fields.get("rollout_s", 0.05), fields.get("train_s", 0.05)
        command = [sys.executable, str(JOB), str(self.folder), str(rollout_s), str(train_s)]
        phases = {
            "rollout": {"seconds": rollout_s, "nodes": len(fields.get("rollout_nodes", [0]))},
            "train": {"seconds": train_s, "memory_gb": fields.get("train_gb", 1e-5)},
        }
        others = {key: fields[key] for key in fields if key not in ("rollout_s", "train_s", "train_gb")}
        base = {"name": name, "command": command, "phases": phases, "group": "main", "slo": 100.0}
        return {**base, "iterations": 3, "max_tokens": 1024, **others}

    @contextmanager
    def held(self, iteration: int, *jobs: str) -> Iterator[None]:
        """Meanwhile none of these sleeping jobs ends this iteration's rollout or a later one's.

        Jobs start in any order: to hold another one than that which a test waits for could keep that from its
        turn.
        """
        draft = self.folder / "hold.new"
        draft.write_text(json.dumps([iteration, jobs]))
        draft.rename(self.folder / "hold")
        try:
            yield
        finally:
            (self.folder / "hold").unlink()

    def submit(self, name: str, **fields: Any) -> Answer:
        return self.ask(Submit, spec=self.spec(name, **fields))

    def status(self) -> dict[str, Any]:
        body = self.ask(Status).body
        return {**body, "jobs": {each["name"]: each for each in body["jobs"]}}

    def job(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.status()["jobs"][name]
        return found

    def wait_state(self, name: str, state: str) -> dict[str, Any]:
        wait_until(lambda: self.job(name)["state"] == state, f"{name} {state}; {self.server.log_tail()}")
        return self.job(name)

    def phases(self, job: str | None = None) -> list[dict[str, Any]]:
        path = self.folder / "phases.jsonl"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []  # whole ones
        found = [json.loads(line) for line in lines]
        return [each for each in found if job in (None, each["job"])]

    def command(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """`rose sched ...`, to its end."""
        self.ask(Status)  # the command itself waits seconds for a scheduler, which may still be starting
        return rose("sched", *argv, environment=self.environment)

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self.server.stop()


def overlap(phases: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of one pool's phases that ran at the same time."""
    return [
        (first, second)
        for number, first in enumerate(phases)
        for second in phases[number + 1 :]
        if first["phase"] == second["phase"]
        and first["begin_s"] < second["end_s"]
        and second["begin_s"] < first["end_s"]
    ]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
