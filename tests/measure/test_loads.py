"""The load generators against a small HTTP server that speaks vLLM's completion stream."""

import asyncio
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rose.errors import ConfigError
from rose.measure.completions import SESSION_HEADER
from rose.measure.records import read_records
from rose.measure.replay import WINDOW_CLOSED, Replay, main, replay
from rose.measure.rollout_load import RolloutLoad, RolloutLoadResult, RolloutWorkload
from rose.measure.trace import ReplayRequest, scaled, synthetic_trace
from rose.scheduler.sim.requests import load_trace

Answer = Callable[["Stream", dict[str, Any]], Awaitable[None]]
SMALL = RolloutWorkload(
    task_tokens=4, min_action_tokens=6, max_action_tokens=6, observation_tokens=2, turns=2, vocab_size=50
)


class Stream:
    """One streamed answer."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    async def open(self) -> None:
        await self._response.prepare(self.request)

    async def send(self, tokens: list[int], finish: str | None = None, stop: str | None = None) -> None:
        choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish, "stop_reason": stop}
        await self._response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())

    async def send_usage(self, usage: dict[str, Any]) -> None:
        await self._response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())

    async def close(self) -> None:
        await self._response.write(b"data: [DONE]\n\n")


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Its URL and the bodies it got, each with the session header under "session"."""
    bodies: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        bodies.append(body | {"session": request.headers.get(SESSION_HEADER)})
        stream = Stream(request)
        await stream.open()
        await answer(stream, body)
        return stream._response

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies
    finally:
        await runner.cleanup()


async def count_up(stream: Stream, body: dict[str, Any]) -> None:
    for token in range(body["max_tokens"]):
        is_last = token == body["max_tokens"] - 1
        await stream.send([token], "length" if is_last else None)
    await stream.close()


async def hang(stream: Stream, body: dict[str, Any]) -> None:
    await stream.send([7])
    await asyncio.sleep(3600)


def request(index: int, at_s: float = 0.0, max_tokens: int = 4) -> ReplayRequest:
    return ReplayRequest(request_id=f"r{index}", at_s=at_s, prompt_token_ids=(1, 2, 3), max_tokens=max_tokens)


def test_synthetic_trace_has_the_burst_shape_of_the_real_one() -> None:
    trace = synthetic_trace(num_requests=20_000, seed=3)
    arrivals = [row.arrival_s for row in trace]
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(1.1, abs=0.12)
    counts = [0] * (int(arrivals[-1] / 60) + 1)
    for at_s in arrivals:
        counts[int(at_s / 60)] += 1
    assert statistics.pvariance(counts[:-1]) / statistics.mean(counts[:-1]) > 5
    assert statistics.median(row.prompt_tokens for row in trace) == pytest.approx(1020, rel=0.1)
    assert statistics.median(row.output_tokens for row in trace) == pytest.approx(129, rel=0.1)


def test_same_seed_gives_the_same_requests() -> None:
    trace = synthetic_trace(num_requests=500, seed=1)
    first, second, other = (scaled(trace, 2.0, 64, 16, 20.0, seed, vocab_size=100) for seed in (5, 5, 6))
    assert first == second
    assert first != other


def test_scaled_requests_fit_the_model_and_the_window() -> None:
    trace = synthetic_trace(num_requests=2_000, seed=1)
    requests = scaled(trace, 4.0, 64, 16, 30.0, 0, vocab_size=100)
    assert len(requests) == 120
    assert all(0.0 <= r.at_s < 30.0 for r in requests)
    assert [r.at_s for r in requests] == sorted(r.at_s for r in requests)
    assert all(1 <= len(r.prompt_token_ids) <= 64 and 2 <= r.max_tokens <= 16 for r in requests)
    assert all(0 <= token < 100 for r in requests for token in r.prompt_token_ids)


def test_bursts_arrive_together_at_the_same_mean_rate() -> None:
    trace = synthetic_trace(num_requests=500, seed=1)
    requests = scaled(trace, 1.0, 64, 16, 30.0, 0, vocab_size=100, burst_size=3)
    assert len(requests) == 30
    assert len({r.at_s for r in requests}) == 10


def test_a_repeated_stretch_has_the_same_times_and_lengths_and_new_tokens() -> None:
    trace = synthetic_trace(num_requests=500, seed=1)
    requests = scaled(trace, 1.0, 64, 16, 30.0, 0, vocab_size=10_000, repeats=2)
    first, second = requests[:30], requests[30:]
    assert [r.at_s for r in second] == pytest.approx([30.0 + r.at_s for r in first])
    assert [len(r.prompt_token_ids) for r in second] == [len(r.prompt_token_ids) for r in first]
    assert [r.max_tokens for r in second] == [r.max_tokens for r in first]
    assert all(a.prompt_token_ids != b.prompt_token_ids for a, b in zip(first, second, strict=True))
    assert len({r.request_id for r in requests}) == 60


def test_a_trace_shorter_than_the_replay_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 100 rows, got 50"):
        scaled(synthetic_trace(num_requests=50, seed=0), 10.0, 64, 16, 10.0, 0, vocab_size=9)


def test_load_trace_reads_seven_decimals_and_starts_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    rows = load_trace(path)
    assert rows[0].arrival_s == 0.0
    assert rows[1].arrival_s == pytest.approx(4.314579, abs=1e-5)
    assert (rows[1].prompt_tokens, rows[1].output_tokens) == (396, 109)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.0,3\n", ":2:"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,3,x\n", ":2:"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no rows"),
    ],
)
def test_bad_trace_names_its_line(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=place):
        load_trace(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"TIMESTAMP\n" + b"x" * (1 << 18)])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"trace.csv: not a CSV file"):
        load_trace(path)


async def test_replay_records_every_token_of_every_request() -> None:
    async with server(count_up) as (url, bodies):
        records = await replay(url, "m", [request(0), request(1, at_s=0.05, max_tokens=2)], cache_salt="s")
    assert [r.token_ids for r in records] == [[0, 1, 2, 3], [0, 1]]
    assert all(r.is_complete and r.ttft_s is not None and r.tpot_s is not None for r in records)
    assert records[1].scheduled_s - records[0].scheduled_s == pytest.approx(0.05)
    assert bodies[0]["temperature"] == 0.0
    assert bodies[0]["ignore_eos"] is True
    assert bodies[0]["stream_interval"] == 1
    assert bodies[0]["cache_salt"] == "s"


async def test_replay_is_open_loop() -> None:
    async with server(hang) as (url, bodies):
        load = Replay(url, "m", [request(i, at_s=0.01 * i) for i in range(5)])
        running = asyncio.create_task(load.run(drain_s=3600.0))
        while [record.token_ids for record in load._records] != [[7]] * 5:
            await asyncio.sleep(0.01)
        assert len(bodies) == 5
        load.stop()
        records = await running
        (late,) = await replay(url, "m", [request(0)], drain_s=0.05)
    assert [r.error for r in [*records, late]] == [WINDOW_CLOSED] * 6
    assert [r.token_ids for r in records] == [[7]] * 5


async def test_replay_keeps_going_when_the_server_is_gone() -> None:
    records = await replay("http://127.0.0.1:9", "m", [request(0), request(1)])
    assert [r.status for r in records] == [0, 0]
    assert all(r.error is not None and not r.is_complete for r in records)


async def test_a_stream_that_ends_early_is_an_error() -> None:
    async def cut_off(stream: Stream, body: dict[str, Any]) -> None:
        await stream.send([1])

    async with server(cut_off) as (url, _):
        (got,) = await replay(url, "m", [request(0)])
    assert got.error is not None
    assert "finish reason" in got.error


async def test_an_abort_keeps_its_reason() -> None:
    async def abort(stream: Stream, body: dict[str, Any]) -> None:
        await stream.send([1], "abort", "rose_reclaimed")

    async with server(abort) as (url, _):
        (got,) = await replay(url, "m", [request(0)])
    assert (got.finish_reason, got.stop_reason, got.is_complete) == ("abort", "rose_reclaimed", False)


async def test_stop_ends_a_replay_between_arrivals() -> None:
    async with server(count_up) as (url, _):
        load = Replay(url, "m", [request(0), request(1, at_s=3600.0)])
        running = asyncio.create_task(load.run())
        while load.progress()["done"] != 1:
            await asyncio.sleep(0.01)
        load.stop()
        records = await running
    assert [r.request_id for r in records] == ["r0"]


async def test_rollout_turns_grow_one_context_under_one_session() -> None:
    async with server(count_up) as (url, bodies):
        load = RolloutLoad(url, "m", SMALL, concurrency=1)
        running = asyncio.create_task(load.run(duration_s=3600.0))
        while load.progress()["trajectories"] < 1:
            await asyncio.sleep(0.01)
        load.stop()
        result = await running
    first, second = bodies[:2]
    assert first["session"] == second["session"]
    assert second["prompt"][: 4 + 6] == [*first["prompt"], *range(6)]
    assert len(second["prompt"]) == 4 + 6 + 2
    assert result.rollout_tokens >= 2 * 6
    assert sum(result.tokens_by_second) == result.rollout_tokens
    assert RolloutLoadResult.from_json(json.loads(json.dumps(result.to_json()))) == result


async def test_an_aborted_turn_resumes_from_its_partial_tokens() -> None:
    asked = 0

    async def abort_first(stream: Stream, body: dict[str, Any]) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            await stream.send([41, 42])
            await stream.send([], "abort", "rose_reclaimed")
        elif asked == 2:
            await stream.send([], "abort", "rose_stall")
        else:
            await count_up(stream, body)

    async with server(abort_first) as (url, bodies):
        load = RolloutLoad(url, "m", SMALL, concurrency=1)
        running = asyncio.create_task(load.run(duration_s=3600.0))
        while load.progress()["turns"] < 1:
            await asyncio.sleep(0.01)
        load.stop()
        result = await running
    assert bodies[2]["prompt"] == [*bodies[0]["prompt"], 41, 42]
    assert bodies[2]["max_tokens"] == 4
    assert result.aborts == {"rose_reclaimed": 1, "rose_stall": 1}
    assert result.errors == 0


async def test_a_load_of_so_many_trajectories_ends_with_them_and_counts_cached_tokens() -> None:
    async def cache_three(stream: Stream, body: dict[str, Any]) -> None:
        await count_up(stream, body)
        assert body["stream_options"] == {"include_usage": True}
        await stream.send_usage({"prompt_tokens_details": {"cached_tokens": 3}})

    async with server(cache_three) as (url, bodies):
        load = RolloutLoad(url, "m", dataclasses.replace(SMALL, max_trajectories=2), concurrency=2)
        result = await load.run(duration_s=3600.0)
    assert (result.trajectories, result.turns, len(bodies)) == (4, 8, 8)
    assert result.later_prompt_tokens == 4 * (4 + 6 + 2)
    assert result.later_cached_tokens == 4 * 3


async def test_rollout_load_outlives_an_absent_server() -> None:
    load = RolloutLoad("http://127.0.0.1:9", "m", SMALL, concurrency=2)
    running = asyncio.create_task(load.run(duration_s=3600.0))
    while load.progress()["errors"] < 2:
        await asyncio.sleep(0.01)
    load.stop()
    result = await running
    assert result.rollout_tokens == 0
    assert result.errors >= 2
    assert result.first_errors


@pytest.mark.slow
async def test_replay_runs_as_its_own_process(tmp_path: Path) -> None:
    out = tmp_path / "serving.jsonl"
    async with server(count_up) as (url, bodies):
        command = ["-m", "rose.measure.replay", "--url", url, "--model", "m", "--out", str(out)]
        load = ["--rate-rps", "20", "--duration-s", "1.5", "--vocab-size", "50", "--drain-s", "600"]
        start_at = str(time.monotonic() + 1.0)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, *load, "--start-at", start_at, stdout=asyncio.subprocess.PIPE
        )
        stdout, _ = await process.communicate()
    assert process.returncode == 0
    assert len(bodies) == 30
    assert all(r.is_complete for r in read_records(out))
    lines = [json.loads(text) for text in stdout.splitlines()]
    assert lines[-1]["done"] == 30
    assert all(math.isfinite(text["t_s"]) for text in lines)


def test_bad_trace_path_exits_with_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "missing.csv"
    status = main(
        ["--url", "http://x", "--model", "m", "--out", str(tmp_path / "o"), "--trace", str(missing)]
    )
    assert status == 2
    assert str(missing) in capsys.readouterr().err
