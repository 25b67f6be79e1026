"""Traces for OpenTelemetry: one span per turn, and inside it one span per attempt.

Owns: the names and attributes of the spans, and their way to a collector.
Promises: a turn's span names its job, session, attempts, workers, tokens and result. The client's
`traceparent` is its parent, and the worker's own spans are children of the attempt's span. Another thread
sends the spans.
Never does: load OpenTelemetry where tracing is off; there a turn costs one comparison.
"""

from typing import Any

from rose.scheduler.rollout.formats.resume import Accumulated

SERVICE_NAME = "rose-router"
PARENT_HEADER = "traceparent"
_OK = "finished"


class TurnSpan:
    """A turn's span, and the span of its current attempt."""

    def __init__(self, tracer: Any, span: Any, context: Any) -> None:
        self._tracer = tracer
        self._span = span
        self._context = context
        self._attempt: Any = None
        self._num_attempts = 0

    def begin_attempt(self, worker_id: str) -> str:
        """Returns the `traceparent` that makes the worker's spans children of the attempt's span."""
        self._num_attempts += 1
        attributes = {"rose.worker": worker_id, "rose.attempt": self._num_attempts}
        self._attempt = self._tracer.start_span("attempt", context=self._context, attributes=attributes)
        made = self._attempt.get_span_context()
        return f"00-{made.trace_id:032x}-{made.span_id:016x}-{int(made.trace_flags):02x}"

    def end_attempt(self, ending: str, num_tokens: int | None = None) -> None:
        """`num_tokens`: the tokens that the attempt generated; None if the router can't count them."""
        self._attempt.set_attribute("rose.ending", ending)
        if num_tokens is not None:
            self._attempt.set_attribute("rose.tokens", num_tokens)
        self._attempt.end()
        self._attempt = None

    def end(self, result: str, generation: Accumulated | None = None) -> None:
        """Ends the turn with the result that the router counts, and an attempt that an error cut short."""
        if self._attempt is not None:
            self.end_attempt(result)
        found: dict[str, Any] = {"rose.result": result, "rose.attempts": self._num_attempts}
        if generation is not None:
            found |= _made(generation)
        self._span.set_attributes(found)
        if result != _OK:
            self._span.set_status(self._error_status(result))
        self._span.end()

    @staticmethod
    def _error_status(result: str) -> Any:
        from opentelemetry.trace import Status, StatusCode

        return Status(StatusCode.ERROR, result)


def _made(generation: Accumulated) -> dict[str, Any]:
    told: dict[str, Any] = {
        "gen_ai.usage.output_tokens": generation.num_tokens,
        "rose.resumes": generation.num_resumes,
        "rose.restarts": generation.num_restarts,
        "rose.workers": [span.worker for span in generation.spans],
    }
    optional = {
        "gen_ai.usage.input_tokens": generation.num_prompt_tokens,
        "rose.cached_tokens": generation.cached_tokens,
    }
    return told | {name: value for name, value in optional.items() if value is not None}


class Traces:
    """Creates spans. Lives on the router's event loop."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("rose.scheduler.rollout")
        self._propagator = TraceContextTextMapPropagator()
        self._set_in_context = set_span_in_context

    def begin(self, job: str, session: str, parent: str | None) -> TurnSpan:
        """Begins a turn's span. `parent`: the client's `traceparent`."""
        carrier = {PARENT_HEADER: parent} if parent is not None else {}
        attributes = {"rose.job": job, "rose.session": session}
        span = self._tracer.start_span(
            "turn", context=self._propagator.extract(carrier), attributes=attributes
        )
        return TurnSpan(self._tracer, span, self._set_in_context(span))

    def close(self) -> None:
        """Sends the remaining spans. Blocks until the collector has taken them."""
        self._provider.shutdown()


def open_traces(endpoint: str) -> Traces:
    """Sends spans to `endpoint`, an OTLP collector over HTTP. The sampler is OpenTelemetry's own setting.

    Raises:
        ModuleNotFoundError: the extra `otel` is not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE_NAME}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Traces(provider)
