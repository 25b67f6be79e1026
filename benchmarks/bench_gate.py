"""Measures the gate's cost per tick, and how fast two processes hand over the GPU, after a SIGKILL too.

Publishing (deadlines of 256 running requests, and the board's page) and checking for a turn happen at every
step of an engine. The hand-over runs between this process, as serving, and another, as rollout, over one
page.

    python benchmarks/bench_gate.py --json gate.json
"""

import argparse
import json
import mmap
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lib.harness import run_benchmark
from lib.slo import gate_player
from lib.slo.gate_player import BARE_BELL, BARE_READY, CANDIDATE, GATE, MODEL, PATIENCE_S

from rose._shm import Words
from rose.admission.board import NUM_WORDS, BoardWord, announce_arrival
from rose.admission.claim import guest_of
from rose.admission.deadlines import ServingDeadlines
from rose.admission.gate import GatePolicy, ServingView
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import NO_WORK, ServingSide
from rose.errors import WorkerError
from rose.measure.figures import Figure, percentile
from rose.memory.pool.pool_memory import BOARD_BYTES

NUM_RUNNING = 256
CONTEXT_TOKENS = NUM_RUNNING * 1000
CHUNK_TOKENS = 2048
HANDOVER_S = 0.05
SERVING_STEP_S = 0.002
STEP_S = 0.001
LONG_STEP_S = 2.0


def measure(args: argparse.Namespace) -> list[Figure]:
    """Costs per call first, then the hand-over."""
    num_ticks, num_steps, num_kills = (2_000, 300, 5) if args.quick else (20_000, 2_000, 20)
    figures = [*tick_figures(num_ticks), *handover_figures(num_steps)]
    return [*figures, arrival_figure(num_steps, args.seed), kill_figure(num_kills)]


def tick_figures(num_ticks: int) -> list[Figure]:
    """One process: what each call of a tick takes."""
    words = Words(mmap.mmap(-1, 8 * NUM_WORDS))
    serving, rollout, policy = ServingSide(words), RolloutSide(words), GatePolicy(GATE)
    deadlines = ServingDeadlines(GATE, chunk_tokens=CHUNK_TOKENS)
    ids = [f"cmpl-{index:032x}" for index in range(NUM_RUNNING)]
    deadlines.produced(ids, time.monotonic())

    def publish() -> None:
        now = time.monotonic()
        serving.publish(deadlines.view(now, MODEL, has_work=True, context_tokens=CONTEXT_TOKENS))

    def decide() -> None:
        policy.decide(time.monotonic(), rollout.view(), CANDIDATE, MODEL)

    calls: list[tuple[str, Callable[[], object], str | None]] = [
        ("publish", publish, "<= 10"),
        ("check", rollout.may_try, "<= 1"),
        ("look and decide", decide, None),
        (f"stamp {NUM_RUNNING} tokens", lambda: deadlines.produced(ids, time.monotonic()), None),
    ]
    return [_call_figure(name, call, target, num_ticks) for name, call, target in calls]


def _call_figure(name: str, call: Callable[[], object], target: str | None, num_ticks: int) -> Figure:
    clock = time.perf_counter_ns
    times_us = []
    for _ in range(num_ticks):
        start_ns = clock()
        call()
        times_us.append((clock() - start_ns) / 1e3)
    p50, p99 = percentile(times_us, 50), percentile(times_us, 99)
    return Figure(name=f"gate_p99_us[{name}]", value=p99, unit="us", target=target, peers={"P50": p50})


def handover_figures(num_steps: int) -> list[Figure]:
    """Two processes: from one side's release of the GPU to the other's start. Beside it what a bare futex
    takes to wake a process: on this host, as busy as it is now, no hand-over can be faster."""
    to_rollout_us, to_serving_us = [], []
    bare_us = _bare_futex_us(num_steps)
    with _board() as (words, side, path), _player(path, num_steps, STEP_S) as player:
        released = _offer(words, side, num_steps, player)
        side.end_step(NO_WORK)
        steps = json.loads(player.communicate(timeout=PATIENCE_S)[0])
    if len(steps) != len(released):
        raise WorkerError(f"{len(released)} turns were used for {len(steps)} steps")
    for (offered_ns, began_ns), (step_began_ns, step_ended_ns) in zip(released, steps, strict=True):
        to_rollout_us.append((step_began_ns - offered_ns) / 1e3)
        to_serving_us.append((began_ns - step_ended_ns) / 1e3)
    both = [*to_rollout_us, *to_serving_us]
    return [
        Figure(
            name=f"handoff_us[{name}]",
            value=percentile(both, percent),
            unit="us",
            target=target,
            peers={
                "serving to rollout": percentile(to_rollout_us, percent),
                "rollout to serving": percentile(to_serving_us, percent),
                "a bare futex": percentile(bare_us, percent),
            },
        )
        for name, percent, target in (("p50", 50, "<= 100"), ("p99", 99, "<= 300"))
    ]


def _bare_futex_us(num_times: int) -> list[float]:
    """From one process's ring to the other's being awake, which slept for as long as a serving step."""
    rung_ns: list[int] = []
    with _board() as (words, _, path), _player(path, num_times, 0.0) as player:
        _wait_until(lambda: words.load(BARE_READY) == 1, "the player is up")
        while len(rung_ns) < num_times and player.poll() is None:
            time.sleep(SERVING_STEP_S)
            rung_ns.append(time.monotonic_ns())
            words.add(BARE_BELL, 1)
            words.wake(BARE_BELL)
        woken_ns = json.loads(player.communicate(timeout=PATIENCE_S)[0])
    if len(woken_ns) != num_times:
        raise WorkerError(f"{num_times} rings woke the player {len(woken_ns)} times")
    return [(woken - rung) / 1e3 for rung, woken in zip(rung_ns, woken_ns, strict=True)]


def arrival_figure(num_arrivals: int, seed: int) -> Figure:
    """Rollouts step at will on an idle GPU; a request comes at any moment and takes it."""
    rng, over_ms = random.Random(seed), []
    with _board() as (words, side, path), _player(path, 10**9, STEP_S):
        _wait_until(lambda: words.load(BoardWord.R_STEPS) >= 10, "the player takes 10 steps")
        for _ in range(num_arrivals):
            time.sleep(rng.uniform(0.5, 2.5) * STEP_S)
            arrived_s = time.monotonic()
            announce_arrival(words)
            side.absorb_arrival(time.monotonic())
            side.begin_step()
            over_ms.append(1e3 * (time.monotonic() - arrived_s - STEP_S))
            side.end_step(NO_WORK)
    return Figure(
        name="yield_p99_over_chunk_ms",
        value=percentile(over_ms, 99),
        unit="ms",
        target="<= 5",
        peers={"P50": percentile(over_ms, 50), "chunk, ms": 1e3 * STEP_S},
    )


def kill_figure(num_kills: int) -> Figure:
    """The rollout process dies in a step that would have taken long; serving waits for it and notices."""
    times_ms = []
    for _ in range(num_kills):
        with _board() as (words, side, path), _player(path, 1, LONG_STEP_S) as player:
            while guest_of(words.load(BoardWord.CLAIM)) < 0:
                time.sleep(0.001)
            player.kill()
            killed_s = time.monotonic()
            side.begin_step()
            times_ms.append(1e3 * (time.monotonic() - killed_s))
    return Figure(
        name="kill_resume_ms",
        value=max(times_ms),
        unit="ms",
        target="<= 20",
        peers={"median": percentile(times_ms, 50)},
        spread=(min(times_ms), max(times_ms)),
    )


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise WorkerError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.001)


@contextmanager
def _board() -> Iterator[tuple[Words, ServingSide, Path]]:
    """A page in a file that another process can map, and its serving side."""
    with TemporaryDirectory(prefix="rose-bench-") as folder:
        path = Path(folder) / "board"
        path.write_bytes(bytes(BOARD_BYTES))
        with path.open("r+b") as file:
            words = Words(mmap.mmap(file.fileno(), BOARD_BYTES))
        yield words, ServingSide(words), path


@contextmanager
def _player(path: Path, num_steps: int, step_s: float) -> Iterator["subprocess.Popen[str]"]:
    script = Path(gate_player.__file__)
    argv = [sys.executable, str(script), str(path), str(num_steps), str(1000 * step_s)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as player:
        try:
            yield player
        finally:
            player.kill()


def _offer(
    words: Words, side: ServingSide, num_steps: int, player: "subprocess.Popen[str]"
) -> list[tuple[int, int]]:
    """(when the GPU was offered, when serving had it again) of every turn that was used."""
    released: list[tuple[int, int]] = []
    side.begin_step()  # the player finds a busy GPU, and not a free one
    give_up_s = time.monotonic() + PATIENCE_S
    while len(released) < num_steps and player.poll() is None and time.monotonic() < give_up_s:
        time.sleep(SERVING_STEP_S)  # serving's step: its process waits for the GPU
        latest_s = time.monotonic() + 1.0
        side.end_step(ServingView(has_work=True, has_pending_prefill=False, latest_start_s=latest_s))
        steps = words.load(BoardWord.R_STEPS)
        offered_ns = time.monotonic_ns()
        side.offer_grant(latest_s, HANDOVER_S)
        side.begin_step()
        if words.load(BoardWord.R_STEPS) != steps:
            released.append((offered_ns, time.monotonic_ns()))
    return released


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
