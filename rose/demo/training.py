"""The demo's trainer as a process, and what its event log says.

Owns the trainer's command line and the reading of its events. Training itself is rose.demo.trainer's.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from rose.demo.processes import RUN_ID, Machine
from rose.demo.records import RewardPoint, SyncPoint
from rose.errors import WorkerError
from rose.measure.rig import Rig
from rose.types import Role

POLL_S = 0.2
FIRST_STEP_S = 600.0
STOP_GRACE_S = 300.0
"""For the step that it is in."""


class TrainingRun:
    """One trainer process; ``events`` grows while it runs.

    Made early: its imports take twenty seconds of CPU and would disturb a measurement. ``begin`` lets it go.
    """

    def __init__(self, rig: Rig, machine: Machine, *, seconds: float, seed: int) -> None:
        self._events_path = rig.folder / "training.jsonl"
        self._start_file = rig.folder / "training.go"
        argv = [
            *("-m", "rose.demo.trainer", "--model", str(rig.model(Role.ROLLOUT))),
            *("--router", machine.router_url, "--relay", machine.relay_url, "--run-id", RUN_ID),
            *(part for url in machine.worker_urls for part in ("--worker", url)),
            *("--events", str(self._events_path), "--start-file", str(self._start_file)),
            *("--time-limit-s", str(seconds), "--seed", str(seed)),
        ]
        self._process = rig.run(argv, "trainer", gives_way=True)

    @property
    def pid(self) -> int:
        """Returns its process id, which is also its process group."""
        return self._process.pid

    def begin(self) -> None:
        """Lets it publish version 0, and then begin its first rollout."""
        self._start_file.touch()

    def wait(self, until_s: float, tick: Callable[[], None]) -> None:
        """Until ``until_s`` (time.monotonic) and the first step's end, later on a slow machine, or the
        trainer's end. Raises: WorkerError if it failed."""
        latest_s = until_s + FIRST_STEP_S
        while self._process.is_alive() and time.monotonic() < (until_s if self.events() else latest_s):
            tick()
            self._process.wait(POLL_S)
        if not self._process.is_alive():
            self._check()

    def stop(self) -> None:
        """End it between two steps. Raises: WorkerError if it failed."""
        self._process.stop(STOP_GRACE_S)
        self._check()

    def _check(self) -> None:
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
        keys = ("version", "dense_bytes", "coo_bytes", "wire_bytes", "num_changed")
        published = [event["publish"] for event in self.events()]
        return tuple(SyncPoint(**{key: e[key] for key in keys}, is_base=e["base"] is None) for e in published)

    def checksums(self) -> tuple[int, int]:
        """(compared, mismatches) between the trainer's state hash and each engine's, over all versions."""
        pairs = [
            (event["publish"]["state_hash"], state_hash)
            for event in self.events()
            for state_hash in event["publish"]["engine_state_hashes"].values()
        ]
        return len(pairs), sum(trained != run for trained, run in pairs)
