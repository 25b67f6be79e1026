"""Measures how long the router takes to find a worker for a turn.

Owns: one figure of bench_router.py. Promises: the router's own placement and policy, on this thread. Never:
opens a socket.
"""

import time
from collections.abc import Sequence

from rose.errors import NoWorkerError
from rose.measure.figures import Figure, percentile
from rose.messages import RoutingStatus
from rose.scheduler.rollout.placing.policy import PaperPolicy
from rose.scheduler.rollout.placing.views import TurnView
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.turn.accounts import JobAccounts
from rose.scheduler.rollout.turn.places import Place, Places, Waiter
from rose.scheduler.rollout.workers.worker import Worker


def decision(count: int, is_queued: bool) -> Figure:
    """Places turns among 16 workers with 128 turns: at once, or through the queue and fair order.

    The figure is wall time, which includes what others took from this core; its own CPU stands beside it.
    """
    config = RouterConfig()
    workers = {}
    for number in range(16):
        worker = Worker(WorkerSpec(url=f"http://w:{number + 1}"), config)
        worker.take_status(RoutingStatus(), 0.0)
        worker.seen(0.0)
        workers[worker.id] = worker
    placement, jobs = Places(workers, PaperPolicy(), JobAccounts(config)), JobAccounts(config)
    job = jobs.get("job", 0.0)
    places: list[Place] = []
    took: list[float] = []
    cpu: list[float] = []

    def take(found: Place | NoWorkerError | None) -> None:
        assert isinstance(found, Place), found
        places.append(found)

    for number in range(count):
        turn = TurnView(
            session=str(number), affine=f"w:{number % 16 + 1}", prompt_tokens=1000, expected_tokens=100
        )
        began, cpu_began = time.perf_counter(), time.thread_time()
        if is_queued:
            placement.enqueue(Waiter(turn, job, 100.0, take))
            placement.pump(0.0)
        else:
            take(placement.place_now(turn, job, 100.0, 0.0))
        cpu.append(time.thread_time() - cpu_began)
        took.append(time.perf_counter() - began)
        if len(places) > 128:
            placement.release(places.pop(0), 100)
    return Figure(
        name=f"added_latency[decision_p99{',queued' if is_queued else ''}]",
        value=percentile_ms(took, 99),
        unit="ms",
        target="<= 0.1",
        peers={
            "P50": percentile_ms(took, 50),
            "CPU P99": percentile_ms(cpu, 99),
            "ROSE §6.4, in all": 10.0,
        },
    )


def percentile_ms(latencies_s: Sequence[float], percent: float) -> float:
    found = percentile(latencies_s, percent)
    assert found is not None
    return 1000 * found
