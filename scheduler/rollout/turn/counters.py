"""What the router counts, and how it is shown.

Owns: Counters and the Prometheus text.
Promises: counts only grow.
Never does: decide anything.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rose.scheduler.rollout.turn.dispatch import Dispatcher
from rose.scheduler.rollout.turn.jobs import JobTable
from rose.scheduler.rollout.turn.latencies import Latencies
from rose.scheduler.rollout.workers.registry import Registry


@dataclass(slots=True)
class Counters:
    turns: Counter[str] = field(default_factory=Counter)
    """Single requests by result: finished, cancelled, or the error's name."""
    reroutes: Counter[str] = field(default_factory=Counter)
    """Attempts that ended otherwise than by a finish, by cause."""
    resumed: int = 0
    restarted: int = 0
    tokens_kept: int = 0
    """Tokens that a resume did not have to generate again."""
    tokens_dropped: int = 0
    """Tokens that a restart threw away."""
    late_chunks: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "turns": dict(self.turns),
            "reroutes": dict(self.reroutes),
            "stalls": self.reroutes["stalled"] + self.reroutes["engine_stall"],
            "aborted": self.reroutes["reclaimed"],
            "resumed": self.resumed,
            "restarted": self.restarted,
            "tokens_kept": self.tokens_kept,
            "tokens_dropped": self.tokens_dropped,
            "late_chunks": self.late_chunks,
        }


class _RouterCollector(Collector):
    def __init__(
        self,
        counters: Counters,
        latencies: Latencies,
        registry: Registry,
        dispatcher: Dispatcher,
        jobs: JobTable,
    ) -> None:
        self._counters = counters
        self._latencies = latencies
        self._jobs = jobs
        self._registry = registry
        self._dispatcher = dispatcher

    def collect(self) -> Iterable[Metric]:
        counts = self._counters
        yield _by("rose_router_turns", "Single requests by result.", "result", counts.turns)
        yield _by("rose_router_reroutes", "Attempts that did not finish, by cause.", "cause", counts.reroutes)
        yield CounterMetricFamily("rose_router_resumed", "Turns continued elsewhere.", value=counts.resumed)
        yield CounterMetricFamily("rose_router_restarted", "Turns begun anew.", value=counts.restarted)
        kept, dropped = counts.tokens_kept, counts.tokens_dropped
        yield CounterMetricFamily("rose_router_tokens_kept", "Tokens kept by resuming.", value=kept)
        yield CounterMetricFamily("rose_router_tokens_dropped", "Tokens lost to restarts.", value=dropped)
        queued = GaugeMetricFamily("rose_router_queued_turns", "Turns waiting for a worker.", labels=["job"])
        for job, length in self._dispatcher.queued_by_job().items():
            queued.add_metric([job], length)
        yield queued
        yield from self._by_job()
        yield from self._workers()
        yield from self._latencies.metrics()

    def _by_job(self) -> Iterable[Metric]:
        tokens = CounterMetricFamily("rose_router_job_tokens", "Tokens generated.", labels=["job"])
        in_flight = GaugeMetricFamily("rose_router_job_in_flight", "Turns on workers.", labels=["job"])
        for job in self._jobs:
            tokens.add_metric([job.name], job.num_tokens)
            in_flight.add_metric([job.name], job.in_flight)
        yield from (tokens, in_flight)

    def _workers(self) -> Iterable[Metric]:
        workers = self._registry.workers()
        names = ["worker", "kind"]
        tokens = CounterMetricFamily("rose_router_worker_tokens", "Tokens generated.", labels=names)
        alive = GaugeMetricFamily("rose_router_worker_alive", "1 if alive.", labels=names)
        in_flight = GaugeMetricFamily("rose_router_worker_in_flight", "Turns on it.", labels=names)
        share = GaugeMetricFamily("rose_router_worker_share", "GPU time left to rollouts.", labels=names)
        for worker in workers:
            labels = [worker.id, worker.spec.kind.value]
            tokens.add_metric(labels, worker.num_tokens)
            alive.add_metric(labels, float(worker.is_alive))
            in_flight.add_metric(labels, worker.in_flight)
            if (known := worker.view().share) is not None:
                share.add_metric(labels, known)
        yield from (tokens, alive, in_flight, share)


def _by(name: str, text: str, label: str, counts: Counter[str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def prometheus_text(
    counters: Counters, latencies: Latencies, registry: Registry, dispatcher: Dispatcher, jobs: JobTable
) -> bytes:
    collectors = CollectorRegistry(auto_describe=False)
    collectors.register(_RouterCollector(counters, latencies, registry, dispatcher, jobs))
    return generate_latest(collectors)
