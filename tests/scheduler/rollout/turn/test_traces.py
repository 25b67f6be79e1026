"""What reaches a collector of traces about a turn, its attempts and its workers."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"prompt": [1, 2, 3], "max_tokens": 6}


@dataclass
class Collector:
    """An OTLP collector: `endpoint` takes what routers send."""

    endpoint: str = ""
    spans: list[Any] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        exported = ExportTraceServiceRequest.FromString(await request.read())
        for resource in exported.resource_spans:
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response(content_type="application/x-protobuf")

    def named(self, name: str) -> list[Any]:
        return sorted(
            (span for span in self.spans if span.name == name), key=lambda span: span.start_time_unix_nano
        )


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield collector
    await runner.cleanup()


async def test_a_rerouted_turn_is_one_span_with_an_attempt_on_each_worker(
    start_router: StartRouter, collector: Collector
) -> None:
    async with ScriptedWorker() as a, ScriptedWorker() as b:
        a.faults.extend(2 * [Fault(kind="disconnect", after_tokens=2)])
        async with start_router(a, otlp_endpoint=collector.endpoint) as client:
            await client.post("/workers", {"url": b.url})
            await client.complete(BODY, X_Rose_Job="job-1", X_Session_ID="s-1", traceparent=PARENT)
    (turn,) = collector.named("turn")
    attempts = collector.named("attempt")
    assert turn.trace_id.hex() in PARENT and turn.parent_span_id.hex() in PARENT
    assert {attempt.parent_span_id for attempt in attempts} == {turn.span_id}
    assert len({attempt.trace_id for attempt in [turn, *attempts]}) == 1
    told = attributes(turn)
    assert (told["rose.job"], told["rose.session"], told["rose.result"]) == ("job-1", "s-1", "finished")
    assert told["rose.attempts"] == len(attempts)
    assert told["rose.resumes"] == len(attempts) - 1
    assert told["gen_ai.usage.output_tokens"] == 6
    assert sum(attributes(attempt)["rose.tokens"] for attempt in attempts) == 6
    assert [attributes(attempt)["rose.ending"] for attempt in attempts][-1] == "finished"
    assert {attributes(attempt)["rose.worker"] for attempt in attempts} >= set(told["rose.workers"])


@pytest.mark.slow
async def test_a_turn_that_fails_is_an_error_and_leaves_no_attempt_open(
    start_router: StartRouter, collector: Collector
) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.append(Fault(kind="hang"))
        async with start_router(worker, otlp_endpoint=collector.endpoint) as client:
            status, _ = await client.post("/v1/completions", BODY, X_Rose_Timeout_S="4")
    assert status == 504
    (turn,), (attempt,) = collector.named("turn"), collector.named("attempt")
    assert (turn.status.code, attributes(turn)["rose.result"]) == (2, "DeadlineExceeded")
    assert attributes(attempt)["rose.ending"] == "DeadlineExceeded"


async def test_a_chat_is_traced_and_the_worker_gets_the_attempt_as_parent(
    start_router: StartRouter, collector: Collector
) -> None:
    async with ScriptedWorker() as worker, start_router(worker, otlp_endpoint=collector.endpoint) as client:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        status, _ = await client.post("/v1/chat/completions", body)
        assert status == 200
        await client.complete(BODY)
    attempts = collector.named("attempt")
    assert [header.split("-")[2] for header in worker.trace_parents] == [a.span_id.hex() for a in attempts]
    assert len(collector.named("turn")) == 2


async def test_without_a_collector_nothing_is_added_to_a_turn(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        await client.complete(BODY, traceparent=PARENT)
        assert client.router.plane.records.traces is None
    assert worker.trace_parents == []
