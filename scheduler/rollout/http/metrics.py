"""The router's metrics for Prometheus.

Owns: their names, labels and help texts, except those of the histograms (turn/latencies.py).
Promises: everything is read when a scrape asks for it; a turn costs nothing here.
Never does: count.
"""

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rose.scheduler.rollout.turn.dataplane import DataPlane


class _RouterCollector(Collector):
    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def collect(self) -> Iterable[Metric]:
        counts = self._plane.records.counters
        yield _by("rose_router_turns", "Single requests by result.", "result", counts.turns)
        yield _by("rose_router_reroutes", "Attempts that did not finish, by cause.", "cause", counts.reroutes)
        yield _by(
            "rose_router_tls_handshakes", "TLS handshakes of clients by result.", "result", counts.handshakes
        )
        yield CounterMetricFamily("rose_router_resumed", "Turns resumed elsewhere.", value=counts.resumed)
        yield CounterMetricFamily("rose_router_restarted", "Turns started again.", value=counts.restarted)
        kept, dropped = counts.tokens_kept, counts.tokens_dropped
        yield CounterMetricFamily("rose_router_tokens_kept", "Tokens kept by resuming.", value=kept)
        yield CounterMetricFamily("rose_router_tokens_dropped", "Tokens lost to restarts.", value=dropped)
        queued = GaugeMetricFamily("rose_router_queued_turns", "Turns waiting for a worker.", labels=["job"])
        for job, length in self._plane.dispatcher.queued_by_job().items():
            queued.add_metric([job], length)
        yield queued
        routers = self._plane.jobs.num_routers
        yield GaugeMetricFamily("rose_router_peers", "Other routers that live.", value=routers - 1)
        yield from self._by_job()
        yield from self._workers()
        yield from self._plane.records.latencies.metrics()

    def _by_job(self) -> Iterable[Metric]:
        tokens = CounterMetricFamily("rose_router_job_tokens", "Tokens generated.", labels=["job"])
        in_flight = GaugeMetricFamily("rose_router_job_in_flight", "Turns on workers.", labels=["job"])
        weight = GaugeMetricFamily(
            "rose_router_job_weight",
            "Part of the generated tokens under contention, relative to other jobs.",
            labels=["job"],
        )
        following = CounterMetricFamily(
            "rose_router_next_turns",
            "Later turns of trajectories, by whether their prompts begin with all tokens of the last turn.",
            labels=["job", "tokens"],
        )
        for job in self._plane.jobs:
            for tokens_are, count in job.next_turns.items():
                following.add_metric([job.name, tokens_are], count)
            tokens.add_metric([job.name], job.num_tokens)
            in_flight.add_metric([job.name], job.in_flight)
            weight.add_metric([job.name], job.spec.weight)
        yield from (tokens, in_flight, weight, following)

    def _workers(self) -> Iterable[Metric]:
        workers = self._plane.registry.workers()
        names = ["worker", "kind"]
        tokens = CounterMetricFamily("rose_router_worker_tokens", "Tokens generated.", labels=names)
        alive = GaugeMetricFamily("rose_router_worker_alive", "1 if the worker is alive.", labels=names)
        in_flight = GaugeMetricFamily("rose_router_worker_in_flight", "Turns on the worker.", labels=names)
        share = GaugeMetricFamily(
            "rose_router_worker_share",
            "GPU time that serving leaves.",
            labels=names,
        )
        lease = GaugeMetricFamily(
            "rose_router_worker_lease", "Turns that the worker leases to this router.", labels=names
        )
        for worker in workers:
            labels = [worker.id, worker.spec.kind.value]
            tokens.add_metric(labels, worker.num_tokens)
            alive.add_metric(labels, float(worker.is_alive))
            in_flight.add_metric(labels, worker.in_flight)
            if (known := worker.view().share) is not None:
                share.add_metric(labels, known)
            if worker.lease is not None:
                lease.add_metric(labels, worker.lease.turns)
        yield from (tokens, alive, in_flight, share, lease)


def _by(name: str, text: str, label: str, counts: Counter[str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def prometheus_text(plane: DataPlane) -> bytes:
    """Returns the router's metrics in Prometheus' text format."""
    collectors = CollectorRegistry(auto_describe=False)
    collectors.register(_RouterCollector(plane))
    return generate_latest(collectors)
