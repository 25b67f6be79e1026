"""Measures what the router adds to a request's latency, beside what a bare pass-through adds.

Owns: one figure per body of bench_router.py, and its account of the slowest requests. Promises: the same
requests, 50 a second each, go through the router, through the pass-through and straight to the stub, one
after the other in every 20 ms, so that disturbances of the machine meet all three. The figure is the
difference of two P99s; only the first requests, which open connections, are left out. A latency is from the
first byte sent to the last byte read, both in the client, so it contains delays of client and stub, as the
direct way does. How late the client sent is reported separately. Never: measures CPU per request (at this
rate caches are cold), or many requests at a time.

The slowest 2% are compared with the median request: how much longer router, client and stub were on their
cores (because the host took a core away, or caches were cold), and how long any of them waited for a core.
The rest is time in which none of them wanted to run, such as a packet's way to a core that sleeps.

If other programs use the machine, waiting for a core is most of the tail, also of the pass-through's. So
beside the figure stands the difference without the requests during which these processes waited for more than
half a millisecond, and the number of the router's such requests.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lib.load.requests import Clock, Sample, Target, open_loop
from lib.router.decision import percentile_ms
from lib.router.rig import BODIES, FLOOR, FLOOR_COMMAND, other_router, requests_for, router, run, stub
from rose.measure.figures import Figure

_PER_S = 50.0
_WARM_UP = 20
"""Requests of each way, ahead of those that count."""
_PARTS = 3
"""The parts into which the run is divided, for the spread."""
_SLOWEST = 0.02
_CALM_S = 0.0005
"""On a machine of their own they hardly wait: the router has a core to itself."""
TARGETS = {"48KB": "<= 3", "190KB": "<= 5"}


def latencies(cpu: int, rng: random.Random, is_quick: bool, *, has_tls: bool = False) -> list[Figure]:
    """Router and pass-through on this CPU, client and stub on the others. `has_tls`: only the router's."""
    count = 600 if is_quick else 3_000
    with (
        stub(num_chunks=4) as (worker, stub_process),
        other_router(FLOOR_COMMAND, [worker], cpu) as (bare, bare_process),
        router(worker, cpu, has_tls=has_tls) as (ours, process),
    ):
        pids = (process.pid, stub_process.pid, os.getpid(), bare_process.pid)
        clocks = [Clock(pid) for pid in pids]
        return [_measure(body, (ours, bare, worker), clocks, rng, count) for body in TARGETS]


def _measure(
    body: str, urls: tuple[str, str, str], clocks: Sequence[Clock], rng: random.Random, count: int
) -> Figure:
    pairs = []
    for url in urls:
        target, fields = Target(url=url), {"stream": True} if url == urls[-1] else {}
        pairs.append((target, requests_for(target, BODIES[body], count + _WARM_UP, rng, **fields)))
    samples = [way[_WARM_UP:] for way in run(open_loop(pairs, _PER_S, clocks))]
    ours, bare, direct = ([each.latency_s for each in way] for way in samples)
    parts = [slice(count * part // _PARTS, count * (part + 1) // _PARTS) for part in range(_PARTS)]
    added = [_added(ours[part], direct[part], 99) for part in parts]
    calm = [[each.latency_s for each in way if _is_calm(each)] for way in samples]
    late = [each.late_s for way in samples for each in way]
    return Figure(
        name=f"added_latency[p99,{body}]",
        value=_added(ours, direct, 99),
        unit="ms",
        target=TARGETS[body],
        peers={
            "P50": _added(ours, direct, 50),
            f"{FLOOR} P50": _added(bare, direct, 50),
            f"{FLOOR} P99": _added(bare, direct, 99),
            "direct P99": percentile_ms(direct, 99),
            "P99 without waits": calm_added_ms(calm[0], calm[-1]),
            f"{FLOOR} P99 without waits": calm_added_ms(calm[1], calm[-1]),
            "% that waited": 100 * (1 - len(calm[0]) / count),
            **_account(samples[0]).as_peers(),
            "sent late, P99": percentile_ms(late, 99),
            "ROSE §6.4, in all": 10.0,
        },
        spread=(min(added), max(added)),
    )


def _is_calm(sample: Sample) -> bool:
    return sum(each.waited_s for each in sample.took) <= _CALM_S


def _added(through: Sequence[float], direct: Sequence[float], percent: float) -> float:
    return percentile_ms(through, percent) - percentile_ms(direct, percent)


def calm_added_ms(through: Sequence[float], direct: Sequence[float]) -> float | None:
    """Returns the P99 that the way adds for requests without waits; None where every request waited."""
    return _added(through, direct, 99) if through and direct else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Account:
    """Milliseconds by which the slowest requests are above the median one, in the mean, and of what."""

    in_all: float
    router_ran: float
    others_ran: float
    waited: float

    def as_peers(self) -> dict[str, float]:
        return {
            "slowest 2% above P50": self.in_all,
            "of it router ran": self.router_ran,
            "client and stub ran": self.others_ran,
            "waited for a core": self.waited,
        }


def _account(samples: Sequence[Sample]) -> _Account:
    ranked = sorted(samples, key=lambda each: each.latency_s)
    slowest = ranked[-max(1, int(_SLOWEST * len(ranked))) :]

    def above(values: Sequence[float], of_slowest: Sequence[float]) -> float:
        return 1000 * (fmean(of_slowest) - median(values))

    ran, waited = [], []
    for index in range(len(samples[0].took)):
        times, theirs = [each.took[index] for each in ranked], [each.took[index] for each in slowest]
        ran.append(above([each.ran_s for each in times], [each.ran_s for each in theirs]))
        waited.append(above([each.waited_s for each in times], [each.waited_s for each in theirs]))
    in_all = above([each.latency_s for each in ranked], [each.latency_s for each in slowest])
    return _Account(in_all=in_all, router_ran=ran[0], others_ran=sum(ran[1:]), waited=sum(waited))
