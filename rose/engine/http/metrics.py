"""ROSE's metrics on vLLM's own /metrics: slack, gate decisions, harvest, grants, stalls, slabs.

Owns the metric names. Values are read from the status page and the board when Prometheus asks, so the step
loop pays nothing. They are registered in the API server's process. With several API servers, vLLM shows only
what processes report through files, so these values are then only in /rose/v1/status.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose._shm import Words
from rose.admission.board_snapshot import BoardSnapshot, snapshot
from rose.admission.gate import GateReason
from rose.admission.slack import NEVER
from rose.messages import HarmHistory, HarmWindow, WorkerStatus

ENGINE = ("engine_id", "role")


class RoseCollector(Collector):
    """The metrics of one engine or of one data-parallel rank, and those of the board if it is given, as it is
    for a serving engine."""

    def __init__(
        self,
        status: Callable[[], WorkerStatus],
        harm: Callable[[], HarmHistory | None],
        board: Words | None,
        slot: int = 0,
    ) -> None:
        """``slot`` is a serving engine's on the board."""
        self._status = status
        self._harm = harm
        self._board = board
        self._slot = slot

    def collect(self) -> Iterator[Metric]:
        """Yields every metric. prometheus_client calls it in a thread of its own."""
        status = self._status()
        labels = (status.engine_id, str(status.role))
        yield from _engine_metrics(status, labels)
        harm = self._harm()
        if harm is not None:
            yield from _harm_metrics(harm, labels)
        if self._board is not None:
            yield from _serving_metrics(snapshot(self._board, self._slot), labels)
            # The guests' figures are the GPU's, so one of its serving engines has them.
            seen = snapshot(self._board)
            if not any(side.alive for side in seen.servings[: self._slot]):
                yield from _guest_metrics(seen, labels)

    def describe(self) -> list[Metric]:
        """Returns nothing, because the engine may not be up yet."""
        return []


def _engine_metrics(status: WorkerStatus, labels: tuple[str, str]) -> Iterator[Metric]:
    counters = {
        "rose_steps": ("Engine steps with tokens", status.steps),
        "rose_generated_tokens": ("Tokens generated", status.generated_tokens),
        "rose_reclaimed_requests": (
            "Rollout requests ended to free their KV slabs",
            status.reclaimed_requests,
        ),
        "rose_stalled_requests": ("Rollout requests ended by a stall", status.stalled_requests),
        "rose_emergency_cuts": ("Emergency cuts of the rollout budget", status.cuts),
        "rose_weights_in_place": ("Weight updates written in place", status.weights_in_place),
        "rose_weights_whole": ("Weight updates loaded as whole checkpoints", status.weights_whole),
        "rose_busy_seconds": ("Time in engine steps", status.busy_s),
    }
    gauges = {
        "rose_adapter_problems": (
            "LoRA adapters whose newest version is not loaded; the status has the reasons",
            len(status.adapter_problems),
        ),
        "rose_kv_slabs_owned": ("KV slabs held", status.kv_slabs_owned),
        "rose_kv_slabs_budget": ("KV slabs that rollouts may hold", status.kv_slabs_budget),
    }
    for name, (text, value) in counters.items():
        yield _counter(name, text, labels, value)
    for name, (text, number) in gauges.items():
        yield _gauge(name, text, labels, number)
    if status.deployment is not None:
        info = GaugeMetricFamily(
            "rose_deployment", "1 for the phases that the engine computes", labels=(*ENGINE, "deployment")
        )
        info.add_metric([*labels, str(status.deployment)], 1)
        yield info


def _harm_metrics(harm: HarmHistory, labels: tuple[str, str]) -> Iterator[Metric]:
    yield _gauge(
        "rose_harm_closed_share",
        "Share of the time in which rollouts are shut out, to measure harm and to bound it",
        labels,
        harm.closed_share,
    )
    yield _gauge(
        "rose_slo_missed_alone",
        "1 if serving can't reach an SLO, or misses it at its load, without rollouts too",
        labels,
        harm.slo_problem is not None,
    )
    share = GaugeMetricFamily(
        "rose_harm",
        "Share by which a serving latency differs with rollouts, in the present hour; 95% bounds",
        labels=(*ENGINE, "tenant", "latency", "bound"),
    )
    seconds = GaugeMetricFamily(
        "rose_latency_seconds",
        "A serving latency in the present hour, and what it would be without rollouts",
        labels=(*ENGINE, "tenant", "latency", "rollouts"),
    )
    for window in harm.hours[:1]:
        for tenant, one in {"": window, **window.tenants}.items():
            _add_window(share, seconds, one, (*labels, tenant))
    yield share
    yield seconds


def _add_window(
    share: GaugeMetricFamily, seconds: GaugeMetricFamily, window: HarmWindow, labels: tuple[str, ...]
) -> None:
    for name, one in window.latencies.items():
        for bound, value in (("low", one.low), ("value", one.value), ("high", one.high)):
            share.add_metric([*labels, name, bound], value)
    for rollouts, values in (("with", window.with_rollouts_ms), ("without", window.without_rollouts_ms)):
        for name, value_ms in values.items():
            seconds.add_metric([*labels, name, rollouts], value_ms / 1000)


def _serving_metrics(seen: BoardSnapshot, labels: tuple[str, str]) -> Iterator[Metric]:
    if seen.latest_start_s < NEVER:
        slack_s = seen.latest_start_s - time.monotonic()
        yield _gauge(
            "rose_serving_slack_seconds", "Time until serving's next step must start", labels, slack_s
        )
    counters = {
        "rose_yields": ("Grants offered to rollouts between serving steps", seen.num_yields),
        "rose_yield_wait_seconds": ("Time that serving waited on grants it had offered", seen.yield_wait_s),
        "rose_begin_wait_seconds": ("Time serving waited for a running rollout step", seen.begin_wait_s),
        "rose_overruns": (
            "Rollout steps past predicted end and grace",
            seen.num_overruns,
        ),
        "rose_rollout_deaths": ("Rollout engines that died during a step", seen.num_deaths),
    }
    for name, (text, value) in counters.items():
        yield _counter(name, text, labels, value)


def _guest_metrics(seen: BoardSnapshot, labels: tuple[str, str]) -> Iterator[Metric]:
    decisions = CounterMetricFamily(
        "rose_gate_decisions",
        "Rollout steps that were ready, by the gate's decision",
        labels=(*ENGINE, "reason"),
    )
    for reason, count in {**seen.declines, GateReason.ADMITTED: seen.rollout.num_steps}.items():
        decisions.add_metric([*labels, str(reason)], count)
    yield decisions
    counters = {
        "rose_harvested_tokens": ("Rollout tokens computed beside serving", seen.rollout_tokens),
        "rose_harvested_seconds": ("Time in rollout steps beside serving", seen.rollout.busy_s),
        "rose_stalls": ("Rollout requests ended by a stall on this GPU", seen.num_stalls),
        "rose_pauses": ("Rollout steps paused between two layers for serving", seen.num_pauses),
        "rose_evictions": ("Times the GPU was taken from a guest that had died or hung", seen.num_evictions),
    }
    for name, (text, value) in counters.items():
        yield _counter(name, text, labels, value)


def _counter(name: str, text: str, labels: tuple[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=ENGINE)
    family.add_metric(labels, value)
    return family


def _gauge(name: str, text: str, labels: tuple[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=ENGINE)
    family.add_metric(labels, value)
    return family
