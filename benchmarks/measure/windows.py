"""Measured windows: serving replay, rollout load, or both at once, each from its own process.

Owns one window's client processes and result. Promises that both loads of a window start at the same time,
and that a window in which other programs used the machine says so (``foreign_cpu_share``).
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from rose.errors import WorkerError
from rose.measure.records import RequestRecord, Window, read_records
from rose.measure.rollout_load import RolloutLoadResult
from rose.node.control import EngineControl
from rose.node.processes import ServerProcess

LEAD_S = 6.0
"""From starting the clients to the window's start: they import first, two of them on one CPU."""
SLACK_S = 120.0
POLL_S = 0.2
RL_STEP_S = 4.0
"""About a step of the demo's trainer."""

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad:
    """The replayed traffic: neighbours of the trace at a time, lengths scaled to the model."""

    rate_rps: float
    burst_size: int
    max_prompt_tokens: int
    max_output_tokens: int
    vocab_size: int
    drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTraffic:
    """The closed-loop rollout load."""

    concurrency: int
    vocab_size: int
    task_tokens: int = 96
    """Length of a trajectory's first prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What all windows of one measurement send."""

    serving: ServingLoad
    rollout: RolloutTraffic
    trace: Path | None
    """An Azure-style CSV of arrivals; None: a generated trace."""
    seed: int


class ClientStarter(Protocol):
    """Starts a window's clients beside the engines."""

    def run(self, argv: Sequence[str], name: str) -> ServerProcess:
        """A Python process; whoever started it stops it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """What runs in a window. ``index`` makes it a distinct sample of the trace."""

    name: str
    index: int
    duration_s: float
    has_serving: bool
    rollout_url: str | None = None
    variant: str = ""
    """Keeps windows of one sample apart, e.g. the gate's mode: no prefix of one is cached for the next."""
    repeats: int = 1
    """How often the sample is played; ``duration_s`` is the whole window's."""

    @property
    def key(self) -> str:
        """Names its files, processes and cache salt."""
        return "-".join(part for part in (self.name, self.variant, str(self.index)) if part)


class WindowRunner:
    """Runs windows one after another on one pair of engines."""

    def __init__(
        self,
        traffic: Traffic,
        folder: Path,
        clients: ClientStarter,
        serving: EngineControl,
        rollout: EngineControl,
    ) -> None:
        """Keeps records in ``folder``."""
        self._traffic = traffic
        self._clients = clients
        self._serving = serving
        self._rollout = rollout
        self._dir = folder

    def run(self, spec: WindowSpec, tick: Tick, wait: Callable[[float], None] | None = None) -> Window:
        """Measure one window; ``tick`` is called a few times a second meanwhile.

        ``wait`` returns at the time that it is given, or later: what makes rollouts where no load does.
        """
        start_s = time.monotonic() + LEAD_S
        replay = self.start_replay(spec, start_s) if spec.has_serving else None
        load = self._start_load(spec, start_s) if spec.rollout_url is not None else None
        meter = BusyMeter(self._serving, self._rollout)
        _wait_until(start_s, tick)
        meter.start()
        tokens_before = self._rollout.status().generated_tokens
        if wait is not None:
            wait(start_s + spec.duration_s)
        else:
            _wait_until(start_s + spec.duration_s, tick)
        duration_s = spec.duration_s if wait is None else time.monotonic() - start_s
        serving_busy_s, rollout_busy_s, foreign = meter.stop()
        rollout_tokens = self._rollout.status().generated_tokens - tokens_before
        result = self._finish_load(load, tick) if load is not None else None
        requests = self.finish_replay(replay, spec, tick) if replay is not None else ()
        return Window(
            name=spec.name,
            start_s=start_s,
            duration_s=duration_s,
            requests=requests,
            rollout_tokens=result.rollout_tokens if result is not None else rollout_tokens,
            rollout_aborts=result.aborts if result is not None else {},
            serving_busy_s=serving_busy_s,
            rollout_busy_s=rollout_busy_s,
            foreign_cpu_share=foreign,
        )

    def start_replay(self, spec: WindowSpec, start_s: float) -> ServerProcess:
        """The serving replay as a process; it ends by itself after the window and its drain."""
        argv = [
            *("-m", "rose.measure.replay", "--url", self._serving.url, "--model", self._serving.model),
            *("--out", str(self._path(spec, "serving"))),
            *replay_flags(self._traffic, spec.index, spec.duration_s / spec.repeats),
            *("--repeats", str(spec.repeats)),
            *("--start-at", str(start_s), "--cache-salt", spec.key),
        ]
        return self._clients.run(argv, f"replay-{spec.key}")

    def finish_replay(self, replay: ServerProcess, spec: WindowSpec, tick: Tick) -> tuple[RequestRecord, ...]:
        """Wait for the replay's end and read its records. Raises: WorkerError."""
        wait_ended(replay, self._traffic.serving.drain_s + SLACK_S, tick)
        return read_records(self._path(spec, "serving"))

    def _start_load(self, spec: WindowSpec, start_s: float) -> ServerProcess:
        traffic = self._traffic.rollout
        argv = [
            *("-m", "rose.measure.rollout_load", "--url", str(spec.rollout_url)),
            *("--model", self._rollout.model, "--out", str(self._path(spec, "load"))),
            *("--concurrency", str(traffic.concurrency), "--duration-s", str(spec.duration_s)),
            *("--vocab-size", str(traffic.vocab_size), "--seed", str(self._traffic.seed)),
            *("--task-tokens", str(traffic.task_tokens)),
            *("--start-at", str(start_s), "--cache-salt", spec.key),
        ]
        return self._clients.run(argv, f"load-{spec.key}")

    def _finish_load(self, load: ServerProcess, tick: Tick) -> RolloutLoadResult:
        wait_ended(load, SLACK_S, tick)
        out = next(self._dir.glob(f"{load.name}.json"))
        return RolloutLoadResult.from_json(json.loads(out.read_text()))

    def _path(self, spec: WindowSpec, kind: str) -> Path:
        suffix = "jsonl" if kind == "serving" else "json"
        return self._dir / f"{kind}-{spec.key}.{suffix}"


class RlSteps:
    """Begins RL steps at a trainer's pace where no trainer runs: each gives rollout a new memory budget."""

    def __init__(self, rollout: EngineControl) -> None:
        self._rollout = rollout
        self._step = 0
        self._next_s = 0.0

    def tick(self) -> None:
        if time.monotonic() >= self._next_s:
            self._step += 1
            self._next_s = time.monotonic() + RL_STEP_S
            self._rollout.begin_rl_step(self._step)


class BusyMeter:
    """Busy seconds of both engines, and what share of the machine others used, between start and stop."""

    def __init__(self, serving: EngineControl, rollout: EngineControl) -> None:
        self._engines = (serving, rollout)
        self._before: tuple[float, ...] = ()
        self._cpu = CpuUse()

    def start(self) -> None:
        self._before = tuple(engine.status().busy_s for engine in self._engines)
        self._cpu.start()

    def stop(self) -> tuple[float, float, float]:
        """(serving busy, rollout busy, foreign CPU share)."""
        foreign = self._cpu.foreign_share()
        after = [engine.status().busy_s for engine in self._engines]
        serving, rollout = (now - then for now, then in zip(after, self._before, strict=True))
        return serving, rollout, foreign


class CpuUse:
    """CPU time of the whole machine minus that of this process and its descendants."""

    def start(self) -> None:
        """Begin to count."""
        self._all_s, self._ours_s, self._at_s = _machine_busy_s(), _family_busy_s(), time.monotonic()

    def foreign_share(self) -> float:
        """What others used since ``start``, as a share of all CPUs' time."""
        used_s = _machine_busy_s() - self._all_s
        ours_s = _family_busy_s() - self._ours_s
        capacity_s = (time.monotonic() - self._at_s) * (psutil.cpu_count() or 1)
        return max(0.0, used_s - ours_s) / capacity_s


def replay_flags(traffic: Traffic, index: int, duration_s: float) -> list[str]:
    """The replay's flags for the ``index``-th sample of the trace: the same requests for the same index."""
    load = traffic.serving
    flags = {
        "--rate-rps": load.rate_rps,
        "--burst-size": load.burst_size,
        "--max-prompt-tokens": load.max_prompt_tokens,
        "--max-output-tokens": load.max_output_tokens,
        "--vocab-size": load.vocab_size,
        "--duration-s": duration_s,
        "--drain-s": load.drain_s,
        "--seed": traffic.seed + index,
    }
    trace = ["--trace", str(traffic.trace)] if traffic.trace is not None else []
    return [*trace, *(str(part) for pair in flags.items() for part in pair)]


def _wait_until(when_s: float, tick: Tick) -> None:
    while (left_s := when_s - time.monotonic()) > 0:
        tick()
        time.sleep(min(POLL_S, left_s))


def wait_ended(process: ServerProcess, timeout_s: float, tick: Tick) -> None:
    """Waits for a process that ends by itself. Raises: WorkerError if it fails or is late."""
    deadline = time.monotonic() + timeout_s
    while process.is_alive() and time.monotonic() < deadline:
        tick()
        process.wait(POLL_S)
    if process.exit_status != 0:
        raise WorkerError(f"{process.name} ended with {process.exit_status}:\n{process.log_tail()}")


def _machine_busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _family_busy_s() -> float:
    """Our own and all descendants' CPU time; a process that ended is counted in its parent's children."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
