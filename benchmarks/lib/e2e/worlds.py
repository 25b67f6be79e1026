"""The worlds of bench_e2e, and its runs: in one process a CPU, with what is done on stderr.

Owns how much is simulated. Decides nothing about a system.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from sim.e2e.calibration import CHANGED, WORKLOAD_8B, WORKLOAD_32B, PaperWorkload
from sim.e2e.fleet import Tape, autoscaled, balanced, fleet_arrivals, play
from sim.e2e.job import JobPlan, JobResult, asynchronous_step_s, run_job
from sim.e2e.systems import MODES, World

from lib.transfer.codec_peers import adam_step
from rose.scheduler.sim.requests import TraceRow
from rose.transfer.format.codec import encode
from rose.transfer.publish.codec_choice import choose_codec
from rose.types import GateMode

Result = TypeVar("Result")

LEARNING_RATE = 6.3e-7
"""Changes about CHANGED of the elements in an Adam-like step (bench_codec.py)."""
WIRE_SAMPLE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is simulated."""

    num_tapes: int
    """Serving engines simulated step by step; the fleet's others are like them."""
    tape_s: int
    num_steps: int
    num_seeds: int


QUICK = Scale(num_tapes=2, tape_s=150, num_steps=3, num_seeds=1)
FULL = Scale(num_tapes=4, tape_s=900, num_steps=4, num_seeds=3)


class WorldPool:
    """A pool of processes. Says on stderr what has been done."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(len(os.sched_getaffinity(0)))
        self._begin_s = time.monotonic()

    def __enter__(self) -> "WorldPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def all(
        self, what: str, work: Sequence[tuple[Callable[..., Result], tuple[object, ...]]]
    ) -> list[Result]:
        """Returns the results of these calls, in order."""
        futures: list[Future[Result]] = [self._pool.submit(call, *given) for call, given in work]
        results = []
        for number, future in enumerate(futures, start=1):
            results.append(future.result())
            took_s = time.monotonic() - self._begin_s
            print(f"{what}: {number} of {len(work)}, {took_s:.0f} s", file=sys.stderr, flush=True)
        return results

    def jobs(self, what: str, world: World, plans: Sequence[JobPlan]) -> list[JobResult]:
        return self.all(what, [(run_job, (world, plan)) for plan in plans])

    def asynchronous(self, what: str, world: World, plans: Sequence[JobPlan]) -> list[float]:
        return self.all(what, [(asynchronous_step_s, (world, plan)) for plan in plans])


def workloads(*, is_quick: bool) -> tuple[PaperWorkload, ...]:
    """Returns 8B whole and half of 32B, and half of each for a quick run."""
    found = (WORKLOAD_8B, WORKLOAD_32B.halved())
    return tuple(workload.halved() for workload in found) if is_quick else found


def make_world(
    runner: WorldPool, workload: PaperWorkload, trace: Sequence[TraceRow], scale: Scale, seed: int
) -> World:
    """Plays the serving fleet, under each gate, alone and autoscaled."""
    num_engines = workload.scenario.num_serving
    arrivals = fleet_arrivals(workload, trace, num_engines, scale.tape_s, seed)
    lent_whole, requests = autoscaled(workload, arrivals, num_engines, scale.tape_s)
    gates: list[GateMode | None] = [*dict.fromkeys(MODES.values()), None]
    shares = [balanced(arrivals, num_engines, engine) for engine in range(scale.num_tapes)]
    work = [
        (play, (workload, mode, mine, scale.tape_s, seed + engine))
        for mode in gates
        for engine, mine in enumerate(shares)
    ]
    work += [
        (play, (workload, None, mine, scale.tape_s, seed + engine))
        for engine, mine in enumerate(requests[: scale.num_tapes])
    ]
    tapes = runner.all(f"serving engines of {workload.name}", work)
    by_gate: list[tuple[Tape, ...]] = [
        tuple(tapes[first : first + scale.num_tapes]) for first in range(0, len(tapes), scale.num_tapes)
    ]
    return World(
        workload=workload,
        tapes={mode: by_gate[index] for index, mode in enumerate(gates) if mode is not None},
        alone=by_gate[-2],
        lent_whole=tuple(lent_whole),
        reload=by_gate[-1],
        wire_bytes=wire_bytes(seed),
    )


def wire_bytes(seed: int) -> float:
    """Bytes of a changed element, encoded by the codec that the publisher chooses over the widest link."""
    old, new = adam_step(WIRE_SAMPLE, LEARNING_RATE, seed)
    num_changed = int((old != new).sum())
    codec = choose_codec(round(CHANGED * old.size), old.nbytes, 200e9 / 8)
    return len(encode(codec, old, new, 0, "BF16").payload) / num_changed
