"""Measures what a SIGKILL of the rollout engine, or of the pool's daemon, costs real engines under load.

Claim: a dead rollout engine's slabs are usable within 500 ms. Slabs stay usable without a daemon, and a
restarted daemon gets every engine back. Neither kill loses a serving request.

    python benchmarks/bench_kill.py --quick --json kill.json
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from lib.faults.signals import kill
from lib.harness import median_figure, run_benchmark
from lib.load.turns import random_prompt

from rose.errors import WorkerError
from rose.measure.figures import Figure
from rose.measure.rig import Rig
from rose.memory.ledger.ledger import Ledger
from rose.node.control import EngineControl
from rose.types import GateMode, Role

POOL = f"kill-{os.getpid()}"
# One serving block a slab, eight rollout blocks.
NUM_SLABS, SLAB_BYTES, HEADROOM_SLABS = 96, 1 << 20, 24
NUM_SERVING_AT_ONCE, SERVING_PROMPT_TOKENS, SERVING_TOKENS = 4, 200, 48
NUM_ROLLOUTS, ROLLOUT_PROMPT_TOKENS, ROLLOUT_TOKENS = 16, 400, 600
NUM_WAVES = 2
"""The waves of rollouts, one after the other, so that the load lasts through control and kill."""
MIN_HELD_SLABS = 6
"""The slabs that the rollout engine holds at least before it is killed."""
PROBE_S = 0.002
CONTROL_S = 3.0
"""The seconds of probing with nothing killed, which show the pauses that the machine itself makes."""
PATIENCE_S = 120.0


@dataclass(slots=True)
class KillSamples:
    """Seconds per kill, and what became of the serving requests."""

    rollout_freed: list[float] = field(default_factory=list)
    rollout_slabs: list[int] = field(default_factory=list)
    control_pause: list[float] = field(default_factory=list)
    daemon_pause: list[float] = field(default_factory=list)
    daemon_back: list[float] = field(default_factory=list)
    daemon_start: list[float] = field(default_factory=list)
    num_served: int = 0
    lost: list[str] = field(default_factory=list)


def measure(args: argparse.Namespace) -> list[Figure]:
    """Kills daemon and rollout engine in turn, a few times each, under one serving load."""
    samples = KillSamples()
    num_repeats = 3 if args.quick else 10
    with ThreadPoolExecutor(NUM_ROLLOUTS) as threads, Rig() as rig:
        pool = rig.pool(POOL, num_slabs=NUM_SLABS, slab_bytes=SLAB_BYTES, headroom_slabs=HEADROOM_SLABS)
        rig.start_engine("serving", Role.SERVING, pool=POOL, gate=GateMode.OFF)
        rollout = rig.start_engine("rollout-0", Role.ROLLOUT, pool=POOL, gate=GateMode.OFF)
        with serving_load(rig.wait_engine("serving"), samples, args.seed):
            for repeat in range(num_repeats):
                if repeat:
                    rollout = rig.start_engine(
                        f"rollout-{repeat}", Role.ROLLOUT, pool=POOL, gate=GateMode.OFF
                    )
                control = rig.wait_engine(f"rollout-{repeat}")
                control.begin_rl_step(repeat + 1)
                for number in range(NUM_WAVES * NUM_ROLLOUTS):
                    prompt = random_prompt(f"rollout-{args.seed}-{repeat}-{number}", ROLLOUT_PROMPT_TOKENS)
                    threads.submit(control.complete, [prompt], ROLLOUT_TOKENS)
                wait_until(
                    pool.ledger,
                    lambda: pool.ledger.num_held(Role.ROLLOUT) >= MIN_HELD_SLABS,
                    "rollouts hold slabs",
                )
                kill_daemon(rig, pool.ledger, samples)
                kill_rollout(rollout.pid, pool.ledger, samples)
    return make_figures(samples)


def kill_daemon(rig: Rig, ledger: Ledger, samples: KillSamples) -> None:
    """The daemon dies, its successor is started at once."""
    with slab_probe(ledger, samples.control_pause):
        time.sleep(CONTROL_S)
    with slab_probe(ledger, samples.daemon_pause):
        killed_at_s = time.monotonic()
        rig.kill_daemon(POOL)
        started_at_s = time.monotonic()
        rig.start_daemon(POOL)
        samples.daemon_start.append(time.monotonic() - started_at_s)
        # Its ledger shows everybody as leaving who hasn't come back.
        wait_until(
            ledger, lambda: not any(engine.is_leaving for engine in ledger.engines().values()), "all are back"
        )
        samples.daemon_back.append(time.monotonic() - killed_at_s)
    if {engine.role for engine in ledger.engines().values()} != set(Role):
        raise WorkerError(f"two engines live, the restarted daemon knows {ledger.engines()}")


def kill_rollout(pid: int, ledger: Ledger, samples: KillSamples) -> None:
    """The whole rollout engine dies: API server, engine core, whatever they started."""
    num_held = ledger.num_held(Role.ROLLOUT)
    if num_held < MIN_HELD_SLABS:
        raise WorkerError(f"the rollout engine holds {num_held} slabs, {MIN_HELD_SLABS} are wanted")
    samples.rollout_slabs.append(num_held)
    killed_at_s = kill(pid)
    wait_until(
        ledger,
        lambda: all(one.role is not Role.ROLLOUT for one in ledger.engines().values()),
        "slabs are free",
    )
    samples.rollout_freed.append(time.monotonic() - killed_at_s)
    ledger.check_integrity()


@contextmanager
def serving_load(control: EngineControl, samples: KillSamples, seed: int) -> Iterator[None]:
    """Keeps some serving requests under way, and judges every answer."""
    closing = threading.Event()

    def run(number: int) -> None:
        index = 0
        while not closing.is_set():
            prompt = random_prompt(f"{seed}-{number}-{index}", SERVING_PROMPT_TOKENS)
            try:
                ((tokens, reason),) = control.complete([prompt], SERVING_TOKENS)
                if (len(tokens), reason) != (SERVING_TOKENS, "length"):
                    samples.lost.append(f"{len(tokens)} tokens, {reason}")
            except WorkerError as error:
                samples.lost.append(str(error))
            samples.num_served += 1
            index += 1

    with ThreadPoolExecutor(NUM_SERVING_AT_ONCE) as threads:
        running = [threads.submit(run, number) for number in range(NUM_SERVING_AT_ONCE)]
        try:
            yield
        finally:
            closing.set()
    for each in running:
        each.result()


@contextmanager
def slab_probe(ledger: Ledger, pauses: list[float]) -> Iterator[None]:
    """Takes and returns a slab in serving's name all the time, and adds the longest pause between two.

    As the serving scheduler itself does when it grows: one compare-and-swap, without asking anybody.
    """
    (slot,) = (slot for slot, engine in ledger.engines().items() if engine.role is Role.SERVING)
    closing = threading.Event()

    def run() -> float:
        taken_at_s, longest_s = time.monotonic(), 0.0
        while not closing.wait(PROBE_S):
            taken = ledger.acquire(slot, 1)
            now = time.monotonic()
            longest_s = max(longest_s, now - taken_at_s)
            if taken:
                taken_at_s = now
                ledger.drain(taken, 0)
        return longest_s

    with ThreadPoolExecutor(1) as threads:
        probing = threads.submit(run)
        try:
            yield
        finally:
            closing.set()
    pauses.append(probing.result())


def wait_until(ledger: Ledger, is_so: Callable[[], bool], what: str) -> None:
    """Sleeps on the ledger's change word, so that the wait adds microseconds. Raises: WorkerError."""
    deadline = time.monotonic() + PATIENCE_S
    seen = ledger.change_seq
    while not is_so():
        if time.monotonic() > deadline:
            raise WorkerError(f"not within {PATIENCE_S:.0f} s: {what}")
        seen = ledger.wait_change(seen, 0.01)


def make_figures(samples: KillSamples) -> list[Figure]:
    """Medians over the kills, best and worst as their spread."""
    for lost in samples.lost:
        print(f"lost a serving request: {lost}")
    return [
        median_figure(
            "kill_recovery_ms[rollout]",
            _ms(samples.rollout_freed),
            "ms",
            target="<= 500",
            peers={"slabs held": float(min(samples.rollout_slabs))},
        ),
        median_figure(
            "kill_recovery_ms[daemon]",
            _ms(samples.daemon_pause),
            "ms",
            target="<= 500",
            peers={
                "nothing killed, median": median(_ms(samples.control_pause)),
                "nothing killed, longest": max(_ms(samples.control_pause)),
            },
        ),
        # Most of it is a Python process that starts; engines don't wait for it.
        median_figure(
            "kill_daemon_back_ms",
            _ms(samples.daemon_back),
            "ms",
            peers={"its successor's start alone": max(_ms(samples.daemon_start))},
        ),
        Figure(
            name="lost_serving_requests",
            value=float(len(samples.lost)),
            unit="requests",
            target="<= 0",
            peers={"sent": float(samples.num_served)},
        ),
    ]


def _ms(seconds: list[float]) -> list[float]:
    return [each * 1e3 for each in seconds]


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
