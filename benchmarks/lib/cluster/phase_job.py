"""The job of bench_mux and bench_crash: phases of a given length, a working set, a checkpoint per iteration.

    phase_job.py LOG ROLLOUT TRAIN [--set-mb N] [--cpus ROLLOUT_CPU,TRAIN_CPU] [--num-permits N]

ROLLOUT and TRAIN are seconds of sleep, which stand for a device's work and cost no CPU; with --cpus they are
numbers of work units, computed on the CPU that stands for the phase's node. With
--num-permits, phases are empty, and the log gets the time that each permit took.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

import rose
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.job.cache import ArraySet
from rose.scheduler.runtime.job.job import running_job

UNIT = np.random.default_rng(0).random((256, 256), dtype=np.float32)
"""Times itself is one unit of work."""


def compute(num_units: int) -> None:
    """Computes on one thread."""
    product = UNIT
    for _ in range(num_units):
        product = UNIT @ product
        product /= product.max()


class PhaseLog:
    """Who ran when, in a log that both sides read with one clock."""

    def __init__(self, path: Path) -> None:
        job = running_job()
        self._name = job.file.name if job is not None else "alone"
        self._path = path

    def note(self, what: str, phase: str, iteration: int, begin_s: float) -> None:
        """Appends one line, with the present time."""
        line = {
            "job": self._name,
            "pid": os.getpid(),
            "what": what,
            "phase": phase,
            "iteration": iteration,
            "begin_s": begin_s,
            "at_s": time.monotonic(),
        }
        with self._path.open("a") as log:  # appended in one write: lines of two jobs don't mix
            log.write(json.dumps(line) + "\n")


class Phases:
    """Does a phase's work and notes it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._log = PhaseLog(arguments.log)
        self._cpus = dict(zip(("rollout", "train"), arguments.cpus, strict=True)) if arguments.cpus else {}

    def run(self, phase: str, iteration: int, amount: float) -> None:
        """Works, then notes when."""
        begin_s = time.monotonic()
        self._log.note("begin", phase, iteration, begin_s)
        if self._cpus:
            os.sched_setaffinity(0, {self._cpus[phase]})
            compute(int(amount))
        else:
            time.sleep(amount)
        self._log.note("end", phase, iteration, begin_s)


def ask_for_permits(log: Path, num_permits: int) -> None:
    """Asks for permits and logs how long each takes, from the call until the phase may begin."""
    job = running_job()
    assert job is not None, "runs under a scheduler alone"
    lines = []
    for iteration in range(num_permits):
        begin_s = time.perf_counter()
        with job.permit(Phase.ROLLOUT, iteration):
            lines.append(json.dumps({"wait_s": time.perf_counter() - begin_s}) + "\n")
    log.write_text("".join(lines))
    job.complete(0)


def main() -> None:
    """Runs the job's iterations."""
    parser = argparse.ArgumentParser()
    parser.add_argument("log", type=Path)
    parser.add_argument("rollout", type=float)
    parser.add_argument("train", type=float)
    parser.add_argument("--set-mb", type=int, default=0)
    parser.add_argument("--cpus", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--num-permits", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.num_permits:
        ask_for_permits(arguments.log, arguments.num_permits)
        return
    phases = Phases(arguments)
    weights = ArraySet()
    weights.arrays = {"weights": np.zeros(arguments.set_mb << 18, np.float32)}

    @rose.phase("rollout")
    def rollout(iteration: int) -> None:
        phases.run("rollout", iteration, arguments.rollout)

    @rose.phase("train", working_set=weights)
    def train(iteration: int) -> None:
        phases.run("train", iteration, arguments.train)

    @rose.runtime_hook
    def iteration(progress: rose.Progress) -> None:
        rollout(progress.iteration)
        train(progress.iteration)

    iteration()


if __name__ == "__main__":
    main()
