"""Measures how long the router takes to find a worker for a turn.

Owns: the decisions' figures of bench_router.py. Promises: the router's own placement and policies, on this
thread. Never: opens a socket.
"""

import random
import time
from collections.abc import Sequence

from rose.errors import NoWorkerError
from rose.measure.figures import Figure, percentile
from rose.messages import RoutingStatus
from rose.scheduler.rollout.placing.cost import CostPolicy
from rose.scheduler.rollout.placing.policy import PaperPolicy, PlacementPolicy
from rose.scheduler.rollout.placing.views import TurnView
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.turn.accounts import JobAccounts
from rose.scheduler.rollout.turn.place import Place
from rose.scheduler.rollout.turn.places import Places, Waiter
from rose.scheduler.rollout.workers.members import Members
from rose.scheduler.rollout.workers.worker import Worker

_TURNS_PER_WORKER = 8


def decision(count: int, is_queued: bool) -> Figure:
    """Places turns among 16 workers with 128 turns: at once, or through the queue and fair order.

    The figure is wall time, which includes what others took from this core; its own CPU stands beside it.
    """
    took_s, cpu_s, _ = _decide(16, PaperPolicy(), count, is_queued=is_queued)
    return Figure(
        name=f"added_latency[decision_p99{',queued' if is_queued else ''}]",
        value=percentile_ms(took_s, 99),
        unit="ms",
        target="<= 0.1",
        peers={
            "P50": percentile_ms(took_s, 50),
            "CPU P99": percentile_ms(cpu_s, 99),
            "ROSE §6.4, in all": 10.0,
        },
    )


def decisions(count: int) -> list[Figure]:
    """Places turns among ever more workers, each with 8 turns. The figure is this thread's CPU.

    As in the router, a turn ends before the next is placed, and the fleet is brought up to date at its end.
    What end and placement take together stands beside the figure.
    """
    policies = (("", PaperPolicy()), (",cost", CostPolicy()))
    return [
        _figure(num_workers, name, policy, count)
        for num_workers in (16, 512, 4000)
        for name, policy in policies
    ]


def _figure(num_workers: int, name: str, policy: PlacementPolicy, count: int) -> Figure:
    found = _decide(num_workers, policy, count + _TURNS_PER_WORKER * num_workers, is_queued=False)
    took_s, cpu_s, with_end_s = (each[-count:] for each in found)  # the first ones fill the workers
    return Figure(
        name=f"decide_us[{num_workers}{name}]",
        value=1000 * percentile_ms(cpu_s, 99),
        unit="us",
        target="<= 100",
        peers={
            "P50": 1000 * percentile_ms(cpu_s, 50),
            "wall P50": 1000 * percentile_ms(took_s, 50),
            "wall P99": 1000 * percentile_ms(took_s, 99),
            "P50 with a turn's end": 1000 * percentile_ms(with_end_s, 50),
            "P99 with a turn's end": 1000 * percentile_ms(with_end_s, 99),
        },
    )


def _decide(
    num_workers: int, policy: PlacementPolicy, count: int, *, is_queued: bool
) -> tuple[list[float], list[float], list[float]]:
    """Returns the seconds that each placement took, the CPU seconds of this thread in it, and those in it and
    in the end of a turn before it."""
    config, rng = RouterConfig(), random.Random(1)
    workers = Members(_worker(number, config, rng.uniform(0.9, 1.1)) for number in range(num_workers))
    jobs = JobAccounts(config)
    placement, job, names = Places(workers, policy, jobs), jobs.get("job", 0.0), list(workers)
    places: list[Place] = []
    took_s: list[float] = []
    cpu_s: list[float] = []
    with_end_s: list[float] = []

    def take(found: Place | NoWorkerError | None) -> None:
        assert isinstance(found, Place), found
        places.append(found)

    for number in range(count):
        end_began = time.thread_time()
        if len(places) > _TURNS_PER_WORKER * num_workers:
            placement.release(places.pop(rng.randrange(len(places))), 100, 0.0)
            placement.pump(0.0)
        end_s = time.thread_time() - end_began
        turn = TurnView(
            session=str(number), affine=rng.choice(names), prompt_tokens=1000, expected_tokens=100
        )
        began, cpu_began = time.perf_counter(), time.thread_time()
        if is_queued:
            placement.enqueue(Waiter(turn, job, 100.0, take))
            placement.pump(0.0)
        else:
            take(placement.place_now(turn, job, 100.0, 0.0))
        cpu_s.append(time.thread_time() - cpu_began)
        took_s.append(time.perf_counter() - began)
        with_end_s.append(end_s + cpu_s[-1])
    return took_s, cpu_s, with_end_s


def _worker(number: int, config: RouterConfig, slowness: float) -> Worker:
    """A live worker whose speed is known."""
    worker = Worker(WorkerSpec(url=f"http://w:{number + 1}"), config)
    worker.take_status(RoutingStatus(), 0.0)
    worker.seen(0.0)
    for _ in range(10):
        worker.speed.saw_decode(0.01 * slowness, 4, 1.0, 0.0)
        worker.speed.saw_prefill(0.1 * slowness, 500.0, 1.0)
    return worker


def percentile_ms(latencies_s: Sequence[float], percent: float) -> float:
    found = percentile(latencies_s, percent)
    assert found is not None
    return 1000 * found
