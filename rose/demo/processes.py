"""The demo's processes: pool, relay, three engines, subscribers, router, trainer.

Owns their layout on two CPUs: both shared engines' models run on the first one, which stands for the GPU; all
else runs on the others. The dedicated engine, the subscribers and the trainer stand for other machines, so
the kernel lets them run only when nothing else wants a CPU. They stand still while serving has work, because
even on another CPU they would slow serving down through the caches and the memory that all CPUs share.
`rose.measure.rig` starts and stops everything.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from rose.admission.board import BoardWord
from rose.admission.claim import has_work
from rose.demo.plan import DemoPlan
from rose.demo.records import TrainingStep
from rose.errors import WorkerError
from rose.measure.rig import Rig, give_way, relay_kind
from rose.measure.stopping import stopping
from rose.node.control import EngineControl
from rose.types import Role

RUN_ID = "demo"
SERVING, ROLLOUT, DEDICATED = "serving", "rollout", "dedicated"
GUEST_NICE = 10
"""The priority of a rollout engine's threads under ROSE (rose/engine/hooks/priority.py), and of the router,
which stands for another machine."""
SERVING_STEP_TOKENS = 32
"""Tokens of a serving step at most, as fleets set it: the prefill of a long prompt in one step would keep
those that decode waiting for several times the TPOT objective."""
RELAY_BYTES = 512 << 20
ALLOWED_HARM = 0.25
"""The share by which serving's P99 may differ under ROSE: far less than the objectives leave (figures.py). At
the default, 2%, rollouts would be shut out for much of the time, as a step is a large part of a TTFT here."""
SLICE_S = 0.01
"""A turn of each engine on the GPU under the static split."""
LOOK_S = 0.001
"""The pause between two looks at whether serving has work."""
POLL_S = 0.2
FIRST_STEP_S = 600.0
STOP_GRACE_S = 300.0


class Machine:
    """The running processes of one demo."""

    def __init__(self, plan: DemoPlan, rig: Rig) -> None:
        """Starts the pool, the relay and the router, and begins to start the engines."""
        self._compute = plan.cpus.compute
        self._rig = rig
        rig.others = plan.cpus.others
        self.pool = rig.pool(plan.pool_name, **plan.pool)
        self.relay_kind = relay_kind(plan.options.relay)
        _, self.relay_url = rig.start_relay("relay", kind=self.relay_kind, capacity_bytes=RELAY_BYTES)
        shared: dict[str, Any] = {"pool": plan.pool_name, "compute_cpus": plan.cpus.compute}
        followed: dict[str, Any] = {"relay": self.relay_url, "run": RUN_ID}
        chunks = ("--max-num-batched-tokens", str(SERVING_STEP_TOKENS))
        rig.start_engine(SERVING, Role.SERVING, vllm_args=chunks, allow_harm=ALLOWED_HARM, **shared)
        rig.start_engine(ROLLOUT, Role.ROLLOUT, **shared, **followed)
        rig.start_engine(DEDICATED, Role.ROLLOUT, **followed)
        self.worker_urls = [rig.config(name).url for name in (DEDICATED, ROLLOUT)]
        kinds = zip(self.worker_urls, ("dedicated", "serving"), strict=True)
        self.router_url = rig.start_router((f"{url},{kind}" for url, kind in kinds), nice=GUEST_NICE)

    def wait(self) -> dict[str, EngineControl]:
        """Returns the engines' controls by name once they serve."""
        controls = {name: self._rig.wait_engine(name) for name in (SERVING, ROLLOUT, DEDICATED)}
        give_way(self._rig.pid(DEDICATED))  # now that it has started
        return controls

    @contextmanager
    def training(self, trainer: "TrainingRun") -> Iterator[None]:
        """Starts the subscriber of both rollout engines. Other machines' stand-ins then stand still while
        serving has work."""
        subscriber_pid = self._rig.start_subscriber(ROLLOUT, DEDICATED).pid
        give_way(subscriber_pid)
        groups = frozenset({-trainer.pid, -subscriber_pid, -self._rig.pid(DEDICATED)})
        board = self.pool.board_words
        with stopping(LOOK_S, lambda: groups if has_work(board.load(BoardWord.CLAIM)) else frozenset()):
            yield

    def share_equally(self) -> None:
        """Gives the steps of both shared engines one priority, as a GPU does without ROSE.

        Only a privileged user could raise a priority again, so what needs this is measured last.
        """
        for name in (SERVING, ROLLOUT):
            for thread in self._core(name).threads():
                if self._compute is not None and os.sched_getaffinity(thread.id) == {int(self._compute)}:
                    os.setpriority(os.PRIO_PROCESS, thread.id, GUEST_NICE)

    @contextmanager
    def split(self) -> Iterator[None]:
        """Splits the GPU between serving and the dedicated engine: fixed slices of time, half for each.

        The engines have KV memory of their own. Neither uses a slice that the other one leaves idle.
        """
        serving, rollout = self._core(SERVING), self._core(DEDICATED)
        if self._compute is not None:
            for thread in rollout.threads():
                os.sched_setaffinity(thread.id, {int(self._compute)})
        turns = itertools.cycle((frozenset({serving.pid}), frozenset({rollout.pid})))
        with stopping(SLICE_S, lambda: next(turns)):
            yield

    def _core(self, name: str) -> psutil.Process:
        """Returns the process that computes the engine's steps: of the API server's children the busiest."""
        children = psutil.Process(self._rig.pid(name)).children(recursive=True)
        return max(children, key=lambda child: child.cpu_times().user)


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
        """Its process id, which is also its process group."""
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
