"""The router under many streams, and under two jobs at once.

Owns: four figures of bench_router.py. Promises: fresh stub and router for each. Never: measures latency.
"""

import asyncio
import json
import os
import random
import time

import httpx
import psutil

from lib.load.requests import Target, closed_loop
from lib.router.rig import cpu_s, requests_for, router, run, stub
from rose.measure.figures import Figure
from rose.scheduler.rollout.placing.fairness import jain

NUM_STREAMS = 384


def streams(cpu: int, is_quick: bool, *, has_tls: bool = False) -> list[Figure]:
    """CPU per chunk and while the streams are read at an engine's pace."""
    rng = random.Random(0)
    num_chunks = 100 if is_quick else 300
    with stub(num_chunks=num_chunks) as (worker, _), router(worker, cpu, has_tls=has_tls) as (url, process):
        _widen(url, worker)
        per_chunk = []
        for _ in range(3):
            used_s, _ = _stream_all(url, process, rng)
            per_chunk.append(1e6 * used_s / (NUM_STREAMS * num_chunks))
    with (
        stub(num_chunks=10 if is_quick else 40, delay_ms=500) as (worker, _),
        router(worker, cpu, has_tls=has_tls) as (url, process),
    ):
        _widen(url, worker)
        used_s, wall_s = _stream_all(url, process, rng)
    return [
        Figure(
            name="cpu_us_chunk",
            value=sorted(per_chunk)[len(per_chunk) // 2],
            unit="us",
            target="<= 60",
            spread=(min(per_chunk), max(per_chunk)),
        ),
        Figure(name="cores_384_streams", value=used_s / wall_s, unit="cores", target="<= 0.25"),
    ]


def _widen(url: str, worker: str) -> None:
    """Room for all streams on the one worker; the cap of 16 a GPU would queue them."""
    worker_id, gpus = worker.removeprefix("http://"), NUM_STREAMS // 16
    httpx.delete(f"{url}/workers/{worker_id}", trust_env=False, verify=False).raise_for_status()
    body = {"url": worker, "gpus": gpus}
    httpx.post(f"{url}/workers", json=body, trust_env=False, verify=False).raise_for_status()


def _stream_all(url: str, process: psutil.Process, rng: random.Random) -> tuple[float, float]:
    """One stream each for NUM_STREAMS clients at once: the router's CPU, and the wall time, in seconds."""
    target = Target(url=url)
    requests = requests_for(target, 512, NUM_STREAMS, rng, stream=True)
    used_s, began = cpu_s(process), time.perf_counter()
    run(closed_loop(target, requests, NUM_STREAMS))
    return cpu_s(process) - used_s, time.perf_counter() - began


def fairness(is_quick: bool, *, is_mixed: bool = False) -> Figure:
    """Two jobs, one with ten times the requests, equal weights: tokens each got while both had work.

    `is_mixed`: the one with more requests asks for tool chats, which go to a worker whole.
    """
    offered = {"big": 200, "small": 20}
    rounds = 3 if is_quick else 10
    with (
        stub(num_chunks=4, delay_ms=10) as (worker, _),
        router(worker, max(os.sched_getaffinity(0))) as (url, _),
    ):
        got = run(_compete(url, offered, rounds, is_mixed))
    return Figure(
        name="jain_mixed" if is_mixed else "jain",
        value=jain(got.values()),
        unit="index",
        target=">= 0.97" if is_mixed else ">= 0.95",
        peers={f"tokens of {job}": float(tokens) for job, tokens in got.items()},
    )


def _chats(target: Target, count: int) -> list[bytes]:
    tool = {"type": "function", "function": {"name": "add"}}
    chat = {"model": "stub", "messages": [{"role": "user", "content": "?"}], "tools": [tool]}
    return [target.request(json.dumps(chat).encode(), "X-Rose-Job: big\r\n")] * count


async def _compete(url: str, offered: dict[str, int], rounds: int, is_mixed: bool) -> dict[str, int]:
    """Closed loops of both jobs until the small one has had its rounds; tokens per job meanwhile."""
    target, rng = Target(url=url), random.Random(0)
    small = [
        request.replace(b"X-Session", b"X-Rose-Job: small\r\nX-Session")
        for request in requests_for(target, 64, offered["small"] * rounds, rng)
    ]
    big_target = Target(url=url, path="/v1/chat/completions") if is_mixed else target
    big = (
        _chats(big_target, offered["big"])
        if is_mixed
        else [
            request.replace(b"X-Session", b"X-Rose-Job: big\r\nX-Session")
            for request in requests_for(target, 64, offered["big"], rng)
        ]
    )
    flood = asyncio.create_task(closed_loop(big_target, big * 1000, offered["big"]))
    async with httpx.AsyncClient(trust_env=False) as client:

        async def queued() -> dict[str, int]:
            return dict((await client.get(f"{url}/admin/status")).json()["queued"])

        while (await queued()).get("big", 0) < offered["big"] // 2:
            await asyncio.sleep(0.05)
        before = await _job_tokens(client, url)
        await closed_loop(target, small, offered["small"])
        after = await _job_tokens(client, url)
    flood.cancel()
    await asyncio.gather(flood, return_exceptions=True)
    return {job: after.get(job, 0) - before.get(job, 0) for job in offered}


async def _job_tokens(client: httpx.AsyncClient, url: str) -> dict[str, int]:
    jobs = (await client.get(f"{url}/admin/jobs")).json()["jobs"]
    return {name: job["tokens"] for name, job in jobs.items()}
