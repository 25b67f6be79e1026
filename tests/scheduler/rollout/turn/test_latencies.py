"""The histograms on the router's /metrics: how long turns waited and how long their tokens took."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rose.scheduler.rollout.turn.journey import Journey, Route
from rose.scheduler.rollout.turn.latencies import Latencies
from tests.scheduler.rollout.conftest import Client, StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker
from tests.scheduler.rollout.waiting import until

BODY: dict[str, Any] = {"prompt": [11, 12, 13], "max_tokens": 5}
KINDS = ("queue", "first_token", "turn", "token")
Samples = dict[tuple[str, str], dict[str, float]]


def read(text: str) -> Samples:
    """(histogram, model) -> its sum, its count and its buckets by bound."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        kind = family.name.removeprefix("rose_router_").removesuffix("_seconds")
        if kind not in KINDS or family.type != "histogram":
            continue
        for sample in family.samples:
            name = sample.labels.get("le", sample.name.rpartition("_")[2])
            found.setdefault((kind, sample.labels["model"]), {})[name] = sample.value
    return found


async def metrics(client: Client) -> Samples:
    async with client.http.get(f"{client.router.url}/metrics") as response:
        assert response.status == 200
        return read(await response.text())


def counts(samples: Samples, model: str) -> list[float]:
    return [samples[kind, model]["count"] for kind in KINDS]


async def test_each_turn_is_timed_under_its_model(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker(models=["a"]) as a,
        ScriptedWorker(models=["b"]) as b,
        start_router(a, b) as client,
    ):
        for _ in range(3):
            await client.complete({**BODY, "model": "a"})
        await client.complete({**BODY, "model": "b", "n": 2})
        await client.complete({**BODY, "model": "b", "max_tokens": 1})  # no token after the first
        samples = await metrics(client)
    assert counts(samples, "a") == [3, 3, 3, 3]
    assert counts(samples, "b") == [3, 3, 3, 2]
    for each in samples.values():
        buckets = [value for name, value in each.items() if name not in ("count", "sum")]
        assert buckets == sorted(buckets) and each["+Inf"] == each["count"]


async def test_the_time_in_the_queue_counts_also_for_turns_that_time_out(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker, turns_per_gpu=1) as client:
        worker.hold()
        running = asyncio.create_task(client.complete(BODY))
        await until(lambda: len(worker.requests) == 1)
        late = await client.post("/v1/completions", BODY, X_Rose_Timeout_S="0.2")
        assert late[0] == 504
        samples = await metrics(client)
        assert (samples["queue", "scripted"]["0.1"], samples["queue", "scripted"]["+Inf"]) == (0, 1)
        worker.go_on()
        await running
        assert counts(await metrics(client), "scripted") == [2, 1, 1, 1]


async def test_a_cut_turn_is_timed_once_and_a_whole_one_has_no_token_times(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.append(Fault(kind="abort_reclaimed", after_tokens=2))
        async with start_router(worker) as client:
            await client.complete(BODY)
            assert counts(await metrics(client), "scripted") == [1, 1, 1, 1]
            chat = {"messages": [{"role": "user", "content": "hi"}]}
            assert (await client.post("/v1/chat/completions", chat))[0] == 200
            assert counts(await metrics(client), "scripted") == [2, 1, 2, 1]


class _OfLatencies(Collector):
    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies

    def collect(self) -> Iterable[Metric]:
        return self._latencies.metrics()


def shown(latencies: Latencies) -> Samples:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OfLatencies(latencies))
    return read(generate_latest(registry).decode())


def journey(began: float, queued_s: float, first_token_at: float | None, num_first_tokens: int) -> Journey:
    route = Route(job="j", explicit_session=None, run_id=None, deadline=0.0)
    made = Journey(session="s", route=route, began=began, queued_s=queued_s)
    made.first_token_at, made.num_first_tokens = first_token_at, num_first_tokens
    return made


def test_the_token_time_is_a_turns_mean_after_its_first_chunk() -> None:
    latencies = Latencies()
    latencies.ended(journey(10.0, 0.5, 12.0, 4), "m", 15.0, 104, is_finished=True)
    latencies.ended(journey(10.0, 7.0, None, 0), "m", 30.0, 0, is_finished=False)
    latencies.ended(journey(10.0, 0.0, 11.0, 1), "m", 30.0, 9, is_finished=False)
    samples = shown(latencies)
    assert counts(samples, "m") == [3, 2, 1, 1]
    assert [samples[kind, "m"]["sum"] for kind in KINDS] == pytest.approx([7.5, 3.0, 5.0, 0.03])
    assert (samples["token", "m"]["0.02"], samples["token", "m"]["0.03"]) == (0, 1)


def test_the_number_of_series_is_bounded_for_any_number_of_models() -> None:
    latencies = Latencies()
    for number in range(1000):
        latencies.ended(journey(0.0, 0.0, None, 0), f"adapter-{number}", 1.0, 0, is_finished=True)
    latencies.ended(journey(0.0, 0.0, None, 0), None, 1.0, 0, is_finished=True)
    samples = shown(latencies)
    assert len({model for _, model in samples}) <= 65
    assert sum(each["count"] for (kind, _), each in samples.items() if kind == "turn") == 1001
    assert samples["turn", ""]["count"] == 1001 - 64
