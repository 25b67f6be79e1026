"""What a SIGKILL costs: of the rollout engine and of the pool's daemon, in turn, under load on real engines.

Claim: a dead rollout engine's slabs are usable within 500 ms; without a daemon slabs are usable throughout; a
restarted daemon gets every engine back; no serving request is lost by either.

    python benchmarks/bench_kill.py --quick --json kill.json
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engines import Setup, SharedEngines, random_prompt
from rich.console import Console
from rich.table import Table

from rose.demo.environment import collect_env
from rose.demo.figures import Figure
from rose.errors import RoseError, WorkerError
from rose.types import Role

SETUP = Setup(
    # One serving block a slab, eight rollout blocks.
    num_slabs=96,
    headroom_slabs=24,
    slab_bytes=1 << 20,
    settings={
        # Loose, so that rollouts get turns although two busy engines share a CPU.
        "slo_ttft_ms": 8000.0,
        "slo_tpot_ms": 2000.0,
        "stall_s": 30.0,
        "serving_window_s": 5.0,
    },
)
NUM_SERVING_AT_ONCE = 4
SERVING_PROMPT_TOKENS, SERVING_TOKENS = 200, 48
NUM_ROLLOUTS, ROLLOUT_PROMPT_TOKENS, ROLLOUT_TOKENS = 16, 400, 600
MIN_HELD_SLABS = 6
"""Of the rollout engine, before it is killed."""
PROBE_S = 0.002
PATIENCE_S = 120.0


@dataclass(slots=True)
class Samples:
    """Seconds per kill, and what became of the serving requests."""

    rollout_freed: list[float] = field(default_factory=list)
    rollout_slabs: list[int] = field(default_factory=list)
    daemon_pause: list[float] = field(default_factory=list)
    daemon_back: list[float] = field(default_factory=list)
    daemon_start: list[float] = field(default_factory=list)
    num_served: int = 0
    lost: list[str] = field(default_factory=list)


class ServingLoad:
    """A context manager: keeps some serving requests under way, and judges every answer."""

    def __init__(self, engines: SharedEngines, samples: Samples, seed: int) -> None:
        self._engines = engines
        self._samples = samples
        self._seed = seed
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"serving-load-{number}", daemon=True)
            for number in range(NUM_SERVING_AT_ONCE)
        ]

    def __enter__(self) -> "ServingLoad":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        control = self._engines.control(Role.SERVING)
        index = 0
        while not self._closing.is_set():
            prompt = random_prompt(f"{self._seed}-{number}-{index}", SERVING_PROMPT_TOKENS)
            try:
                ((tokens, reason),) = control.complete([prompt], SERVING_TOKENS)
                if (len(tokens), reason) != (SERVING_TOKENS, "length"):
                    self._samples.lost.append(f"{len(tokens)} tokens, {reason}")
            except WorkerError as error:
                self._samples.lost.append(str(error))
            self._samples.num_served += 1
            index += 1


class SlabProbe:
    """A context manager: takes and returns a slab in serving's name all the time; the longest pause between.

    As the serving scheduler itself does when it grows: one compare-and-swap, without asking anybody.
    """

    def __init__(self, engines: SharedEngines) -> None:
        self._ledger = engines.ledger
        (self._slot,) = (
            slot for slot, engine in self._ledger.engines().items() if engine.role is Role.SERVING
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slab-probe", daemon=True)
        self.longest_pause_s = 0.0

    def __enter__(self) -> "SlabProbe":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        taken_at_s = time.monotonic()
        while not self._closing.wait(PROBE_S):
            taken = self._ledger.acquire(self._slot, 1)
            now = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now - taken_at_s)
            if taken:
                taken_at_s = now
                self._ledger.drain(taken, 0)


def measure(engines: SharedEngines, num_repeats: int, seed: int) -> Samples:
    """Kills daemon and rollout engine in turn, ``num_repeats`` times each, under one serving load."""
    samples = Samples()
    engines.start(Role.SERVING, Role.ROLLOUT)
    with ServingLoad(engines, samples, seed):
        for repeat in range(num_repeats):
            if repeat:
                engines.start(Role.ROLLOUT)
            engines.control(Role.ROLLOUT).begin_rl_step(repeat + 1)
            prompts = [
                random_prompt(f"rollout-{seed}-{repeat}-{i}", ROLLOUT_PROMPT_TOKENS)
                for i in range(NUM_ROLLOUTS)
            ]
            rollouts = engines.request(Role.ROLLOUT, prompts, ROLLOUT_TOKENS)
            wait_until(engines, lambda: engines.held(Role.ROLLOUT) >= MIN_HELD_SLABS, "rollouts hold slabs")
            kill_daemon(engines, samples)
            kill_rollout(engines, samples, rollouts)
    return samples


def kill_daemon(engines: SharedEngines, samples: Samples) -> None:
    """The daemon dies, its successor is started at once."""
    with SlabProbe(engines) as probe:
        killed_at_s = time.monotonic()
        engines.kill_daemon()
        started_at_s = time.monotonic()
        engines.start_daemon()
        samples.daemon_start.append(time.monotonic() - started_at_s)
        wait_until(
            engines,
            lambda: not any(engine.is_leaving for engine in engines.ledger.engines().values()),
            "every engine is back",
        )
        samples.daemon_back.append(time.monotonic() - killed_at_s)
    samples.daemon_pause.append(probe.longest_pause_s)
    if len(engines.ledger.engines()) != len(Role):
        raise WorkerError(f"the restarted daemon knows {engines.ledger.engines()}, two engines live")


def kill_rollout(
    engines: SharedEngines, samples: Samples, rollouts: Sequence[Future[list[tuple[list[int], str]]]]
) -> None:
    """The whole rollout engine dies."""
    ledger = engines.ledger
    wait_until(engines, lambda: engines.held(Role.ROLLOUT) >= MIN_HELD_SLABS, "rollouts hold slabs")
    samples.rollout_slabs.append(engines.held(Role.ROLLOUT))
    killed_at_s = time.monotonic()
    engines.kill(Role.ROLLOUT)
    wait_until(
        engines,
        lambda: all(one.role is not Role.ROLLOUT for one in ledger.engines().values()),
        "slabs are free",
    )
    samples.rollout_freed.append(time.monotonic() - killed_at_s)
    ledger.check_integrity()
    engines.forget(Role.ROLLOUT)
    for rollout in rollouts:
        rollout.exception()


def wait_until(engines: SharedEngines, is_so: Callable[[], bool], what: str) -> None:
    """Sleeps on the ledger's change word, so that the wait adds microseconds. Raises: WorkerError."""
    deadline = time.monotonic() + PATIENCE_S
    seen = engines.ledger.change_seq
    while not is_so():
        if time.monotonic() > deadline:
            raise WorkerError(f"not within {PATIENCE_S:.0f} s: {what}")
        seen = engines.ledger.wait_change(seen, 0.01)


def make_figures(samples: Samples) -> list[Figure]:
    return [
        _figure("kill_recovery_ms[rollout]", samples.rollout_freed, target="<= 500"),
        _figure("kill_recovery_ms[daemon]", samples.daemon_pause, target="<= 500"),
        # Most of it is a Python process that starts; engines don't wait for it.
        _figure("daemon_back_ms", samples.daemon_back, peers={"successor's own start": samples.daemon_start}),
        Figure(
            name="lost_serving_requests",
            value=float(len(samples.lost)),
            unit="requests",
            target="<= 0",
            peers={"sent": float(samples.num_served)},
        ),
    ]


def _figure(
    name: str,
    seconds: Sequence[float],
    target: str | None = None,
    peers: dict[str, list[float]] | None = None,
) -> Figure:
    """The median in ms; ``spread`` holds best and worst."""
    return Figure(
        name=name,
        value=statistics.median(seconds) * 1e3,
        unit="ms",
        target=target,
        peers={peer: statistics.median(values) * 1e3 for peer, values in (peers or {}).items()},
        spread=(min(seconds) * 1e3, max(seconds) * 1e3),
    )


def print_figures(figures: Sequence[Figure], samples: Samples, num_repeats: int) -> None:
    table = Table(
        title=f"SIGKILL under serving load, {num_repeats} of each, slabs held {samples.rollout_slabs}"
    )
    for column in ("figure", "median", "worst", "unit", "target", "beside it"):
        table.add_column(column, justify="right" if column in ("median", "worst") else "left")
    for figure in figures:
        worst = f"{figure.spread[1]:.1f}" if figure.spread is not None else ""
        beside = ", ".join(f"{name} {value:.0f}" for name, value in figure.peers.items() if value is not None)
        table.add_row(figure.name, f"{figure.value:.1f}", worst, figure.unit, figure.target or "", beside)
    console = Console()
    console.print(table, markup=False)
    for lost in samples.lost[:5]:
        console.print(f"lost: {lost}", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints the table, writes the JSON. Status 1 if it could not run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 kills of each instead of 10")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write env and figures here")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    env = collect_env(seed=args.seed, quick=args.quick)
    num_repeats = 3 if args.quick else 10
    try:
        with (
            tempfile.TemporaryDirectory(prefix="rose-bench-") as folder,
            SharedEngines(Path(folder), SETUP) as engines,
        ):
            samples = measure(engines, num_repeats, args.seed)
    except RoseError as error:
        print(f"bench_kill: {error}", file=sys.stderr)
        return 1
    figures = make_figures(samples)
    print_figures(figures, samples, num_repeats)
    print(env.describe())
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"env": env.to_json(), "figures": [asdict(figure) for figure in figures]}
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
