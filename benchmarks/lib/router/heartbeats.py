"""What the router's heartbeats cost with ever more workers, without any turn.

Owns: figures of bench_router.py. Promises: every worker has an address of its own and answers like a ROSE
engine, all in one process of its own; CPU is that of the router's process alone. Never: places turns.
"""

import sys
import time

import httpx
import psutil

from lib.router.rig import cpu_s, other_router, stub
from rose.errors import WorkerError
from rose.measure.figures import Figure

NUM_WORKERS = (16, 512, 4000, 10_000)
HEARTBEAT_S = 0.5
"""The router's own default."""
START_S = 60.0


def heartbeats(cpu: int, is_quick: bool) -> list[Figure]:
    """The router's CPU while it asks all of this many workers, and how often it reaches each of them."""
    return [_figure(num_workers, cpu, 3.0 if is_quick else 10.0) for num_workers in NUM_WORKERS]


def _figure(num_workers: int, cpu: int, measured_s: float) -> Figure:
    with stub(has_status=True) as (url, _):
        port = url.rpartition(":")[2]
        workers = [f"--worker http://127.1.{i // 250}.{i % 250 + 1}:{port}" for i in range(num_workers)]
        spec = f"ours={sys.executable} -m rose.scheduler.rollout.http.command --port {{port}} {{worker}}"
        with other_router(spec, workers, cpu) as (_, process):
            _wait_for(url, 2 * num_workers)
            used_s, num_answers, took_s = _measure(url, process, measured_s)
    return Figure(
        name=f"heartbeat_cores[{num_workers}]",
        value=used_s / took_s,
        unit="cores",
        target="<= 0.5" if num_workers == 4000 else None,
        peers={
            "us each": 1e6 * used_s / num_answers,
            "s between two of a worker": took_s * num_workers / num_answers,
        },
    )


def _measure(url: str, process: psutil.Process, measured_s: float) -> tuple[float, int, float]:
    """Returns the router's CPU seconds, the answered heartbeats and the seconds that passed."""
    started, answers, used_s = time.monotonic(), _num_answers(url), cpu_s(process)
    time.sleep(measured_s)
    used_s, answers = cpu_s(process) - used_s, _num_answers(url) - answers
    return used_s, answers, time.monotonic() - started


def _wait_for(url: str, num_answers: int) -> None:
    until = time.monotonic() + START_S
    while _num_answers(url) < num_answers:
        if time.monotonic() > until:
            raise WorkerError(f"not within {START_S:.0f} s: {num_answers} answered heartbeats")
        time.sleep(0.1)


def _num_answers(url: str) -> int:
    """Returns how often the stub has answered a question for its status."""
    answer = httpx.get(f"{url}/num_statuses", trust_env=False, timeout=START_S)
    return int(answer.raise_for_status().json()["num_statuses"])
