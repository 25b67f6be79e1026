"""How long turns take, as Prometheus histograms by model.

Owns: the histograms' names and buckets.
Promises: a turn costs four binary searches, at its end. The number of series is bounded, however many models
come and go.
Never does: read a clock, decide anything.
"""

from collections.abc import Iterable

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from rose.scheduler.histogram import Histogram
from rose.scheduler.rollout.turn.journey import Journey

_TURN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
    *(1800.0, 3600.0),
)
"""These bounds reach from an immediate place to the default deadline of turns."""
_TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
)
"""These bounds reach from a small model's step to a rollout's pace on a busy serving GPU."""
_MAX_MODELS = 64
_OTHERS = ""
"""Stands for the models beyond these, such as one adapter per step, and for models no worker names."""
_TEXTS = {
    "queue": "Time a turn waited for a worker, over all its attempts.",
    "first_token": "Time from the request to its first token.",
    "turn": "Time from the request to the end of its answer, for turns that finished.",
    "token": "Mean time per token after the first ones, for turns that finished.",
}


class Latencies:
    """Lives on the router's event loop."""

    def __init__(self) -> None:
        self._by_model: dict[str, dict[str, Histogram]] = {}

    def ended(
        self, journey: Journey, model: str | None, now: float, num_tokens: int, *, is_finished: bool
    ) -> None:
        """Adds a turn. `model`: a name that a worker gave; None if there is none."""
        times = self._of(model)
        times["queue"].add(journey.queued_s)
        if journey.first_token_at is not None:
            times["first_token"].add(journey.first_token_at - journey.began)
        if not is_finished:
            return
        times["turn"].add(now - journey.began)
        if journey.first_token_at is not None and num_tokens > journey.num_first_tokens:
            took_s = now - journey.first_token_at
            times["token"].add(took_s / (num_tokens - journey.num_first_tokens))

    def _of(self, model: str | None) -> dict[str, Histogram]:
        is_counted = model in self._by_model or len(self._by_model) < _MAX_MODELS
        name = model if model is not None and is_counted else _OTHERS
        if name not in self._by_model:
            bounds = dict.fromkeys(_TEXTS, _TURN_BOUNDS_S) | {"token": _TOKEN_BOUNDS_S}
            self._by_model[name] = {kind: Histogram(each) for kind, each in bounds.items()}
        return self._by_model[name]

    def metrics(self) -> Iterable[Metric]:
        """Yields rose_router_{queue,first_token,turn,token}_seconds."""
        for kind, text in _TEXTS.items():
            family = HistogramMetricFamily(f"rose_router_{kind}_seconds", text, labels=["model"])
            for model, times in sorted(self._by_model.items()):
                family.add_metric([model], buckets=times[kind].buckets(), sum_value=times[kind].sum)
            yield family
