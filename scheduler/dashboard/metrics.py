"""The cluster scheduler's numbers for Prometheus: the state view in its text format.

Owns the metrics' names. Counters return to 0 only when the scheduler restarts. Without an answer from the
scheduler, `rose_sched_up` is 0 and is the only metric.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class _StateCollector(Collector):
    """One answer of the scheduler; None: there is none."""

    def __init__(self, state: Mapping[str, Any] | None) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "rose_sched_up", "1 if the scheduler answers.", value=float(self._state is not None)
        )
        if self._state is not None:
            yield from _cluster(self._state)
            yield from _jobs(self._state["jobs"])
            yield from _meter(self._state["meter"])


def prometheus_text(state: Mapping[str, Any] | None) -> bytes:
    """Returns the metrics. `state`: what /api/v1/state shows; None while the scheduler does not answer."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StateCollector(state))
    return generate_latest(registry)


def _cluster(state: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauges("rose_sched_jobs", "Jobs by state.", ["state"], _rows(state["states"]))
    yield GaugeMetricFamily("rose_sched_groups", "Groups that have jobs.", value=_num_groups(state))
    nodes = [(kind, use, pool[f"num_{use}"]) for kind, pool in state["pools"].items() for use in _USES]
    yield _gauges("rose_sched_nodes", "Nodes by pool and use.", ["pool", "use"], nodes)
    sizes = [(kind, pool["num_nodes"]) for kind, pool in state["pools"].items()]
    yield _gauges("rose_sched_pool_nodes", "Nodes that a pool has.", ["pool"], sizes)
    idle = [(kind, pool["idle_share"]) for kind, pool in state["pools"].items()]
    yield _gauges("rose_sched_idle_share", "Idle part of the certified cycles.", ["pool"], idle)
    cost = state["cost"]
    yield GaugeMetricFamily(
        "rose_sched_dollars_per_hour", "What the nodes of all groups cost.", value=cost["dollars_per_hour"]
    )
    yield GaugeMetricFamily(
        "rose_sched_solo_dollars_per_hour",
        "What the jobs would cost with nodes of their own.",
        value=cost["solo_dollars_per_hour"],
    )


_USES = ("used", "empty", "drained")


def _num_groups(state: Mapping[str, Any]) -> int:
    return sum(bool(group["jobs"]) for group in state["groups"])


def _jobs(jobs: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    done = CounterMetricFamily("rose_sched_iterations", "Iterations that are safe.", labels=["job"])
    restarts = CounterMetricFamily("rose_sched_resubmissions", "Starts after a crash.", labels=["job"])
    moves = CounterMetricFamily("rose_sched_moves", "Moves from one group to another.", labels=["job"])
    preemptions = CounterMetricFamily(
        "rose_sched_preemptions", "Places that the job has given to another.", labels=["job"]
    )
    slowdown = GaugeMetricFamily(
        "rose_sched_slowdown",
        "An iteration's time over the one alone: slo, certified, observed_mean, observed_worst.",
        labels=["job", "kind"],
    )
    for job in jobs:
        done.add_metric([job["name"]], job["iterations"][0])
        restarts.add_metric([job["name"]], job["restarts"])
        moves.add_metric([job["name"]], len(job["moves"]))
        preemptions.add_metric([job["name"]], len(job["preemptions"]))
        for kind in ("target", "certified", "observed_mean", "observed_worst"):
            if (value := job["slo"][kind]) is not None:
                slowdown.add_metric([job["name"], "slo" if kind == "target" else kind], value)
    yield from (done, restarts, moves, preemptions, slowdown)


def _meter(meter: Mapping[str, Any]) -> Iterator[Metric]:
    events = CounterMetricFamily("rose_sched_events", "What has happened, by kind.", labels=["event"])
    for event, count in sorted(meter["events"].items()):
        events.add_metric([event], count)
    yield events
    yield _histogram(
        "rose_sched_permit_wait_seconds",
        "Time from asking for a permit to holding it.",
        "phase",
        meter["waits"],
    )
    yield _histogram(
        "rose_sched_permit_hold_seconds",
        "Time from holding a permit to giving it back.",
        "phase",
        meter["holds"],
    )
    yield _histogram("rose_sched_decision_seconds", "Time to decide one call.", "call", meter["decisions"])


def _histogram(name: str, text: str, label: str, histograms: Mapping[str, Any]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, each in sorted(histograms.items()):
        bounds = [*(f"{bound:g}" for bound in each["bounds"]), "+Inf"]
        family.add_metric(
            [value],
            buckets=list(zip(bounds, itertools.accumulate(each["counts"]), strict=True)),
            sum_value=each["sum"],
        )
    return family


def _rows(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items())


def _gauges(name: str, text: str, labels: list[str], rows: Iterable[tuple[Any, ...]]) -> Metric:
    """A row: the labels' values, then the number; None is left out."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for *values, number in rows:
        if number is not None:
            family.add_metric(values, number)
    return family
