"""The demo's trainer as a process, and what its log says.

Owns the trainer's command line and the reading of its log. Training itself is rose.demo.trainer's.
"""

import json
import time
from collections.abc import Callable

from rose.demo.processes import RUN_ID, Machine
from rose.demo.records import TrainingStep
from rose.errors import WorkerError
from rose.measure.rig import Rig
from rose.types import Role

POLL_S = 0.2
FIRST_STEP_S = 600.0
STOP_GRACE_S = 300.0


class TrainingRun:
    """One trainer process, whose ``steps`` grow while it runs.

    It is made early, because its imports take twenty seconds of CPU and would disturb a measurement.
    """

    def __init__(self, rig: Rig, machine: Machine, seed: int) -> None:
        self._log = rig.folder / "training.jsonl"
        self._start_file = rig.folder / "training.go"
        argv = [
            *("-m", "rose.demo.trainer", "--model", str(rig.model(Role.ROLLOUT))),
            *("--router", machine.router_url, "--relay", machine.relay_url, "--run-id", RUN_ID),
            *("--num-workers", str(len(machine.worker_urls)), "--seed", str(seed)),
            *("--log", str(self._log), "--start-file", str(self._start_file)),
        ]
        self._process = rig.run(argv, "trainer", gives_way=True)

    @property
    def pid(self) -> int:
        """Returns its process id, which is also its process group."""
        return self._process.pid

    @property
    def steps(self) -> tuple[TrainingStep, ...]:
        """Returns the finished steps, in order."""
        if not self._log.exists():
            return ()
        whole_lines = self._log.read_text().rpartition("\n")[0].splitlines()
        return tuple(TrainingStep(**json.loads(line)) for line in whole_lines)

    def begin(self) -> None:
        """Lets it publish version 0, and then begin its first rollout."""
        self._start_file.touch()

    def wait(self, until_s: float, tick: Callable[[], None]) -> None:
        """Waits until ``until_s`` (time.monotonic), and on a slow machine for the first step's end.

        Raises: WorkerError if the trainer ended meanwhile.
        """
        latest_s = until_s + FIRST_STEP_S
        while time.monotonic() < (until_s if self.steps else latest_s):
            tick()
            if self._process.wait(POLL_S) is not None:
                self._fail()

    def stop(self) -> None:
        """Stops it. Raises: WorkerError if it had failed."""
        self._process.stop(STOP_GRACE_S)
        if self._process.exit_status != 0:
            self._fail()

    def _fail(self) -> None:
        raise WorkerError(f"trainer ended with {self._process.exit_status}:\n{self._process.log_tail()}")
