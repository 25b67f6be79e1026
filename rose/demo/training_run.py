"""The demo's trainer process, and what its event log says.

Owns the trainer's command line and the reading of its events. Training itself is rose.demo.trainer's.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose.demo.processes import RUN_ID, Cluster
from rose.demo.records import RewardPoint, SyncPoint
from rose.errors import WorkerError
from rose.node.processes import ServerProcess

MAX_STEPS = 10_000
POLL_S = 0.2
FIRST_STEP_S = 600.0
STOP_GRACE_S = 300.0
"""For the step that it is in."""


class TrainingRun:
    """One trainer process; ``events`` grows while it runs.

    Made early: its imports take twenty seconds of CPU and would disturb a measurement. ``begin`` lets it go.
    """

    def __init__(self, cluster: Cluster, model: Path, out_dir: Path, *, seconds: float, seed: int) -> None:
        self._events_path = out_dir / "training.jsonl"
        self._start_file = out_dir / "training.go"
        self._cluster = cluster
        argv = [
            *("-m", "rose.demo.trainer", "--model", str(model), "--endpoint", cluster.router_url),
            *("--served-model", "rollout", "--relay", cluster.relay_url, "--run-id", RUN_ID),
            *("--worker", cluster.url("rollout"), "--worker", cluster.url("dedicated")),
            *("--events", str(self._events_path), "--steps", str(MAX_STEPS)),
            *("--time-limit-s", str(seconds), "--seed", str(seed)),
            *("--start-file", str(self._start_file)),
        ]
        self._process: ServerProcess = cluster.run(argv, "trainer", is_elsewhere=True, is_pinned=False)

    def begin(self) -> None:
        """Publish version 0, then the first rollout. From here on the trainer keeps off the compute CPUs."""
        self._cluster.pin(self._process)
        self._start_file.touch()

    def wait(self, until_s: float, tick: Callable[[], None]) -> None:
        """Until ``until_s`` (time.monotonic) and the first step's end, later on a slow machine, or the
        trainer's end. Raises: WorkerError if it failed."""
        latest_s = until_s + FIRST_STEP_S
        while self._process.is_alive() and time.monotonic() < (until_s if self.events() else latest_s):
            tick()
            self._process.wait(POLL_S)
        if not self._process.is_alive() and self._process.exit_status != 0:
            raise WorkerError(f"trainer ended with {self._process.exit_status}:\n{self._process.log_tail()}")

    def stop(self) -> None:
        """End it between two steps. Raises: WorkerError if it failed."""
        self._process.stop(STOP_GRACE_S)
        if self._process.exit_status != 0:
            raise WorkerError(f"trainer ended with {self._process.exit_status}:\n{self._process.log_tail()}")

    def events(self) -> list[dict[str, Any]]:
        """One dict per finished step, in order."""
        if not self._events_path.exists():
            return []
        whole_lines = self._events_path.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in whole_lines if line]

    def rewards(self) -> tuple[RewardPoint, ...]:
        return tuple(
            RewardPoint(step=e["step"], reward_mean=e["reward_mean"], success=e["success_rate"])
            for e in self.events()
        )

    def syncs(self) -> tuple[SyncPoint, ...]:
        published = [event["publish"] for event in self.events() if event["publish"] is not None]
        return tuple(
            SyncPoint(
                version=str(one["version"]),
                dense_bytes=one["dense_bytes"],
                coo_bytes=one["coo_bytes"],
                wire_bytes=one["wire_bytes"],
                num_changed=one["num_changed"],
                is_base=one["base"] is None,
            )
            for one in published
        )

    def checksums(self) -> tuple[int, int]:
        """(compared, mismatches) between the trainer's state hash and each engine's, over all versions."""
        compared = mismatches = 0
        for event in self.events():
            published = event["publish"]
            if published is None:
                continue
            for state_hash in published["engine_state_hashes"].values():
                compared += 1
                mismatches += state_hash != published["state_hash"]
        return compared, mismatches
