"""Several serving engines and guests share a GPU while they are killed and stopped; lateness is counted.

Every party is a process whose steps are sleeps, so no GPU is needed. A serving step is late if it begins
later than one hand-over after it is wanted. A hand-over takes the longest guest's step, its grace, and the
time that the host needs to wake a process, which bare sleeps in the same processes measure. A step that waits
into the grace was held up by a guest that failed. Each kill or stop of a guest may cost each serving engine
one such step.

    python benchmarks/bench_board.py --json board.json
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from lib.harness import run_benchmark
from lib.slo import board_player
from lib.slo.board_player import (
    FAULTS,
    NUM_BINS,
    OVERLAPS,
    PARTIES,
    PARTY_WORDS,
    RECORD_BYTES,
    SLEEPS,
    STEPS,
    STOP,
    WAITS,
    open_words,
)
from rich.console import Console
from rich.progress import Progress

from rose._shm import Words
from rose.admission.board import GRACE_S
from rose.admission.board_snapshot import snapshot
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import NO_WORK, ServingSide
from rose.config import child_environment
from rose.errors import WorkerError
from rose.measure.figures import Figure, percentile
from rose.memory.pool.pool_memory import BOARD_BYTES

FAULT_EVERY_S = 0.25
LONGEST_STOP_S = 0.4
STEP_MS = (0.5, 1.0, 3.0, 1.0)
"""The guests' steps. They say that they take up to twice as long."""
SERVING, GUEST, IDLE_SERVING, IDLE_GUEST = "serve", "guest", "idle-serving", "idle-guest"
PATIENCE_S = 600.0
"""For parties to start."""
RUN_S = 3600.0
"""The longest time for all steps of a figure."""


def measure(args: argparse.Namespace) -> list[Figure]:
    """Measures lateness, then the cost of a claim with two parties and with five."""
    num_steps = 2_000 if args.quick else 100_000
    return [
        lateness_figure("n_party_lateness", 2, 3, num_steps, args.seed),
        lateness_figure("guest_lateness", 1, 4, num_steps, args.seed),
        *claim_figures(2_000 if args.quick else 20_000),
    ]


@dataclass(slots=True)
class Party:
    """A process and its place in the record."""

    number: int
    kind: str
    step_ms: float
    process: "subprocess.Popen[bytes] | None" = None


@dataclass(slots=True)
class BoardRig:
    """A page, a record, and the parties on it."""

    folder: Path
    compute: str | None = None
    """The device on which steps are kernels; without one they are sleeps."""
    parties: list[Party] = field(default_factory=list)
    kills: int = 0
    stops: int = 0
    guest_faults: int = 0
    words: Words = field(init=False)
    record: Words = field(init=False)

    def __post_init__(self) -> None:
        for path, num_bytes in ((self.page, BOARD_BYTES), (self.record_path, RECORD_BYTES)):
            path.write_bytes(bytes(num_bytes))
        self.words = open_words(str(self.page), BOARD_BYTES)
        self.record = open_words(str(self.record_path), RECORD_BYTES)

    @property
    def page(self) -> Path:
        return self.folder / "board"

    @property
    def record_path(self) -> Path:
        return self.folder / "record"

    def start(self, party: Party) -> None:
        script = Path(board_player.__file__)
        argv = [sys.executable, str(script), str(self.page), str(self.record_path), party.kind]
        device = [self.compute] if self.compute is not None else []
        environment = child_environment({"PYTHONPATH": os.pathsep.join(sys.path)})  # they import as we do
        party.process = subprocess.Popen(
            [*argv, str(party.number), str(party.step_ms), *device], env=environment
        )

    def count(self, party: Party, word: int) -> int:
        return self.record.load(PARTIES + PARTY_WORDS * party.number + word)

    def bins(self, kind: str, first: int) -> list[int]:
        """Returns, for each number of ms, how often all parties of a kind counted a time of that length."""
        of_kind = [party for party in self.parties if party.kind == kind]
        return [sum(self.count(party, first + ms) for party in of_kind) for ms in range(NUM_BINS)]

    def steps(self, kind: str) -> int:
        return sum(self.count(party, STEPS) for party in self.parties if party.kind == kind)

    def fail(self, party: Party, rng: random.Random) -> None:
        """Kills a party and starts it again, or stops it for a while."""
        process = party.process
        assert process is not None
        faults = PARTIES + PARTY_WORDS * party.number + FAULTS
        self.record.add(faults, 1)
        if rng.random() < 0.5:
            process.kill()
            process.wait()
            steps = self.count(party, STEPS)
            self.start(party)
            self.kills += 1
            if self.compute is not None:
                # It loads torch first, for seconds: faults that came meanwhile would let nobody compute.
                _wait_until(lambda: self.count(party, STEPS) > steps, "a party that was killed steps again")
        else:
            process.send_signal(signal.SIGSTOP)
            time.sleep(rng.random() * LONGEST_STOP_S)
            process.send_signal(signal.SIGCONT)
            self.stops += 1
        self.record.add(faults, 1)
        self.guest_faults += party.kind == GUEST


@contextmanager
def _rig(parties: Sequence[tuple[str, float]], compute: str | None = None) -> Iterator[BoardRig]:
    with TemporaryDirectory(prefix="rose-bench-") as folder:
        rig = BoardRig(Path(folder), compute)
        rig.parties = [Party(number, kind, step_ms) for number, (kind, step_ms) in enumerate(parties)]
        try:
            for party in rig.parties:
                rig.start(party)
            _wait_until(lambda: all(rig.count(party, STEPS) for party in rig.parties), "every party steps")
            yield rig
        finally:
            for party in rig.parties:
                if party.process is not None:
                    party.process.kill()
                    party.process.wait()


def lateness_figure(
    name: str, num_serving: int, num_guests: int, num_steps: int, seed: int, compute: str | None = None
) -> Figure:
    """Counts serving steps that began later than their bound, while parties are killed and stopped.

    ``compute``: the device on which steps are kernels; without one they are sleeps.
    """
    rng = random.Random(seed)
    guests = [(GUEST, STEP_MS[number]) for number in range(num_guests)]
    with _rig([(SERVING, 0.0)] * num_serving + guests, compute) as rig:
        with Progress(console=Console(stderr=True)) as shown:
            task, give_up_s = shown.add_task(name, total=num_steps), time.monotonic() + RUN_S
            while (done := rig.steps(SERVING)) < num_steps:
                if time.monotonic() > give_up_s:
                    raise WorkerError(f"{done} of {num_steps} steps within {RUN_S:.0f} s")
                shown.update(task, completed=done)
                time.sleep(rng.random() * 2 * FAULT_EVERY_S)
                rig.fail(rng.choice(rig.parties), rng)
        rig.record.store(STOP, 1)
        waits, sleeps = rig.bins(SERVING, WAITS), rig.bins(SERVING, SLEEPS)
        seen = snapshot(rig.words)
        noise_ms = _longest(sleeps) + 1
        hand_over_ms = int(2 * max(STEP_MS)) + 1
        held = sum(waits[hand_over_ms + noise_ms :])
        late = sum(waits[hand_over_ms + int(1e3 * GRACE_S) + noise_ms :])
        unexplained = max(0, held - late - num_serving * rig.guest_faults)
        shortest = min(rig.count(party, STEPS) for party in rig.parties if party.kind == GUEST)
        return Figure(
            name=name,
            value=late + unexplained,
            unit="steps",
            target="0",
            peers={
                "serving steps": rig.steps(SERVING),
                "guests' steps": rig.steps(GUEST),
                "of the guest with fewest": shortest,
                "kills": rig.kills,
                "stops": rig.stops,
                "overlaps": rig.record.load(OVERLAPS),
                "held up by a failed guest": held,
                "overruns": seen.num_overruns,
                "longest wait, ms": _longest(waits),
                "bound, ms": hand_over_ms,
                "a bare sleep's longest delay, ms": _longest(sleeps),
            },
        )


def _longest(bins: Sequence[int]) -> int:
    return max((ms for ms, count in enumerate(bins) if count), default=0)


def claim_figures(num_times: int) -> list[Figure]:
    """Measures the cost of claim and release for a serving step and a guest's step, without a wait."""
    figures = []
    for num_serving, num_guests in ((1, 1), (2, 3)):
        others = [(IDLE_SERVING, 0.0)] * (num_serving - 1) + [(IDLE_GUEST, 0.0)] * (num_guests - 1)
        with _rig(others) as rig:
            serving, guest = ServingSide(rig.words), RolloutSide(rig.words)
            serving_us, guest_us = [], []
            for _ in range(num_times):
                start_ns = time.perf_counter_ns()
                serving.begin_step()
                serving.end_step(NO_WORK)
                middle_ns = time.perf_counter_ns()
                guest.try_begin(time.monotonic() + 1.0, guest.view())
                guest.end_step(1)
                serving_us.append((middle_ns - start_ns) / 1e3)
                guest_us.append((time.perf_counter_ns() - middle_ns) / 1e3)
            rig.record.store(STOP, 1)
        for side, times_us in (("serving", serving_us), ("guest", guest_us)):
            figures.append(
                Figure(
                    name=f"claim_us[{side}, {num_serving} serving + {num_guests} guests]",
                    value=percentile(times_us, 50),
                    unit="us",
                    peers={"P99": percentile(times_us, 99)},
                )
            )
    return figures


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise WorkerError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.001)


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
