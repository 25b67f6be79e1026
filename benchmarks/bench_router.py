"""The router costs little: latency and CPU per request and per chunk, against a stub worker.

Router, stub and client are processes of their own. The router is pinned to the last CPU, client and stub
share the others. Peers run one after the other on the same CPU against the same stub:

    --peer 'vllm-router=BIN/vllm-router --worker-urls {worker} --host 127.0.0.1 --port {port}'
    --peer 'sglang-router,/generate=BIN/python -m sglang_router.launch_router --worker-urls {worker}
            --host 127.0.0.1 --port {port}'

Peers pass an answer through; the router streams from its worker and keeps the tokens, to resume the turn
elsewhere. Bodies: token ids, 0.7 KB, 48 KB (8k ids), 190 KB (32k ids). The stub answers 64 tokens in 4
chunks; it echoes the prompt's ids to the router, as vLLM does with return_token_ids.

Beside ours stands what a bare pass-through of the same bytes costs, aiohttp on both sides and nothing
in between (bare_passthrough.py): "aiohttp floor".

  added_latency[decision_p99]   a turn's placement among 16 workers, as the router asks for it
  added_latency[decision_p99,queued]   the same by way of the queue and its fair order
  added_latency[p99,48KB]       P99 through the router less P99 direct, 50 req/s each, interleaved
  cpu_ms[0.7KB], [48KB], cpu_ms_32k   CPU of the router process per request, 8 at a time
  cpu_us_chunk                  CPU per chunk of 16 tokens to streaming clients, 384 streams at a time, all of
                                their requests' CPU included
  cores_384_streams             CPU while 384 streams get 2 chunks a second each (30 tokens/s)
  jain                          two jobs offering 10:1 on one worker: Jain's index of tokens per entitlement

    python benchmarks/bench_router.py --json router.json
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import uvloop
from harness import run_benchmark
from requests_load import Target, closed_loop, open_loop
from router_decision import decision, percentile_ms

from rose.demo.figures import Figure
from rose.errors import WorkerError
from rose.node.checks import free_port
from rose.scheduler.rollout.fairness import jain

STUB = Path(__file__).with_name("stub_worker.py")
PASSTHROUGH = Path(__file__).with_name("bare_passthrough.py")
FLOOR = "aiohttp floor"
BODIES = {"0.7KB": 120, "48KB": 8_192, "190KB": 32_768}
"""Prompt tokens."""
LONG_BODIES = ("48KB", "190KB")
NUM_STREAMS = 384
START_S = 30.0

Result = TypeVar("Result")


def measure(args: argparse.Namespace) -> list[Figure]:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:-1] or cpus)
    try:
        return _measure(args, cpus[-1])
    finally:
        os.sched_setaffinity(0, cpus)


def _measure(args: argparse.Namespace, cpu: int) -> list[Figure]:
    num_decisions, num_latencies = (2_000, 150) if args.quick else (20_000, 1_500)
    figures = [decision(num_decisions, is_queued=is_queued) for is_queued in (False, True)]
    rng = random.Random(args.seed)
    floor = f"{FLOOR}={sys.executable} {PASSTHROUGH} --worker {{worker}} --port {{port}}"
    with _stub(num_chunks=4) as worker:
        with _command(floor, worker, cpu) as (url, _):
            bare = {name: _added(url, worker, name, rng, num_latencies) for name in LONG_BODIES}
        with _router(worker, cpu) as (router, process):
            figures += [_latency(router, worker, n, rng, num_latencies, bare[n]) for n in LONG_BODIES]
            ours = _cpu_per_request(Target(url=router), process, rng, args.quick)
    peers: dict[str, dict[str, float | None]] = {name: {} for name in BODIES}
    for spec in (floor, *args.peer):
        for name, value in _peer(spec, cpu, rng, args.quick).items():
            peers[name][spec.partition("=")[0].partition(",")[0]] = value
    figures += [_cpu_figure(name, values, peers[name]) for name, values in ours.items()]
    figures += _streams(cpu, args.quick)
    return [*figures, _fairness(cpu, args.quick)]


# Processes ------------------------------------------------------------------------------------------------


@contextmanager
def _stub(**flags: object) -> Iterator[str]:
    """A stub worker's URL."""
    argv = [sys.executable, str(STUB)]
    for name, value in flags.items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    with _started(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()


@contextmanager
def _started(
    argv: Sequence[str], cpu: int | None = None, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv, **options)
    try:
        if cpu is not None:
            psutil.Process(process.pid).cpu_affinity([cpu])
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _router(worker: str, cpu: int, *flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """Our router before one worker, ready."""
    port = free_port()
    argv = [sys.executable, "-m", "rose.scheduler.rollout.service", "--port", str(port), "--worker", worker]
    with _listening([*argv, *flags], port, cpu) as ready:
        yield ready


@contextmanager
def _listening(argv: Sequence[str], port: int, cpu: int) -> Iterator[tuple[str, psutil.Process]]:
    url = f"http://127.0.0.1:{port}"
    with _started(argv, cpu, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + START_S
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > until:
                raise WorkerError(f"{shlex.join(argv)} did not become ready in {START_S:.0f} s")
            time.sleep(0.1)
        yield url, psutil.Process(process.pid)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=1.0).status_code == 200
    except httpx.HTTPError:
        return False


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _cpu_s(process: psutil.Process) -> float:
    """CPU of a process and its children so far."""
    times = [p.cpu_times() for p in [process, *process.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


# Requests -------------------------------------------------------------------------------------------------


def _requests(
    target: Target, num_tokens: int, count: int, rng: random.Random, **fields: object
) -> list[bytes]:
    """Requests whose prompts differ from the first id on; a session each, as a trainer sends."""
    rest = ",".join(str(rng.randrange(150_000)) for _ in range(num_tokens - 1))
    made = []
    for number in range(count):
        key = "prompt"
        body: dict[str, object] = {"model": "stub", "max_tokens": 64, "temperature": 1.0, **fields}
        if target.path == "/generate":
            key, body = "input_ids", {"sampling_params": {"max_new_tokens": 64}}
        others = json.dumps(body, separators=(",", ":"))
        data = f'{{"{key}":[{number},{rest}],{others[1:]}'.encode()
        made.append(target.request(data, f"X-Session-ID: s{number}\r\n"))
    return made


def _added(url: str, worker: str, body: str, rng: random.Random, count: int) -> dict[str, float]:
    """What a way through `url` adds to the same requests sent to the worker directly, in ms."""
    through, direct = Target(url=url), Target(url=worker)
    pairs = [
        (through, _requests(through, BODIES[body], count, rng)),
        (direct, _requests(direct, BODIES[body], count, rng, stream=True)),
    ]
    theirs, alone = _run(open_loop(pairs, per_s=50.0))
    added = {f"P{p}": percentile_ms(theirs, p) - percentile_ms(alone, p) for p in (50, 99)}
    return {**added, "direct P99": percentile_ms(alone, 99)}


def _latency(
    router: str, worker: str, body: str, rng: random.Random, count: int, bare: dict[str, float]
) -> Figure:
    added = _added(router, worker, body, rng, count)
    floor = {f"{FLOOR} {percent}": bare[percent] for percent in ("P50", "P99")}
    return Figure(
        name=f"added_latency[p99,{body}]",
        value=added.pop("P99"),
        unit="ms",
        target="<= 3" if body == "48KB" else "<= 5",
        peers={**added, **floor, "ROSE §6.4, in all": 10.0},
    )


def _cpu_per_request(
    target: Target, process: psutil.Process, rng: random.Random, is_quick: bool
) -> dict[str, list[float]]:
    """Milliseconds of CPU per request, three rounds per body."""
    found: dict[str, list[float]] = {}
    for name, num_tokens in BODIES.items():
        count = (400 if is_quick else 2_000) if num_tokens < 30_000 else (150 if is_quick else 600)
        _run(closed_loop(target, _requests(target, num_tokens, 20, rng), 8))
        found[name] = []
        for _ in range(3):
            requests = _requests(target, num_tokens, count // 3, rng)
            before = _cpu_s(process)
            _run(closed_loop(target, requests, 8))
            found[name].append(1000 * (_cpu_s(process) - before) / len(requests))
    return found


def _cpu_figure(name: str, values: list[float], peers: dict[str, float | None]) -> Figure:
    return Figure(
        name="cpu_ms_32k" if name == "190KB" else f"cpu_ms[{name}]",
        value=sorted(values)[1],
        unit="ms",
        target="<= 0.5" if name == "190KB" else None,
        peers=peers,
        spread=(min(values), max(values)),
    )


def _peer(spec: str, cpu: int, rng: random.Random, is_quick: bool) -> dict[str, float]:
    """A peer's CPU per request, by body."""
    path = spec.partition("=")[0].partition(",")[2] or "/v1/completions"
    with _stub(num_chunks=4) as worker, _command(spec, worker, cpu) as (url, process):
        values = _cpu_per_request(Target(url=url, path=path), process, rng, is_quick)
    return {body: sorted(each)[1] for body, each in values.items()}


@contextmanager
def _command(spec: str, worker: str, cpu: int) -> Iterator[tuple[str, psutil.Process]]:
    """A router of another's before one worker, ready."""
    port = free_port()
    argv = shlex.split(spec.partition("=")[2].format(worker=worker, port=port))
    with _listening(argv, port, cpu) as ready:
        yield ready


def _streams(cpu: int, is_quick: bool) -> list[Figure]:
    rng = random.Random(0)
    num_chunks = 100 if is_quick else 300
    with _stub(num_chunks=num_chunks) as worker, _router(worker, cpu) as (router, process):
        _widen(router, worker)
        per_chunk = []
        for _ in range(3):
            cpu_s, _ = _stream_all(router, process, rng)
            per_chunk.append(1e6 * cpu_s / (NUM_STREAMS * num_chunks))
    with _stub(num_chunks=10 if is_quick else 40, delay_ms=500) as worker, _router(worker, cpu) as started:
        cores = _steady_cores(*started, worker, rng)
    return [
        Figure(
            name="cpu_us_chunk",
            value=sorted(per_chunk)[len(per_chunk) // 2],
            unit="us",
            target="<= 60",
            spread=(min(per_chunk), max(per_chunk)),
        ),
        Figure(name="cores_384_streams", value=cores, unit="cores", target="<= 0.25"),
    ]


def _steady_cores(router: str, process: psutil.Process, worker: str, rng: random.Random) -> float:
    _widen(router, worker)
    cpu_s, wall_s = _stream_all(router, process, rng)
    return cpu_s / wall_s


def _widen(router: str, worker: str) -> None:
    """Room for all streams on the one worker; the cap of 16 a GPU would queue them."""
    worker_id, gpus = worker.removeprefix("http://"), NUM_STREAMS // 16
    httpx.delete(f"{router}/workers/{worker_id}", trust_env=False).raise_for_status()
    httpx.post(f"{router}/workers", json={"url": worker, "gpus": gpus}, trust_env=False).raise_for_status()


def _stream_all(router: str, process: psutil.Process, rng: random.Random) -> tuple[float, float]:
    """One stream each for NUM_STREAMS clients at once: the router's CPU, and the wall time, in seconds."""
    target = Target(url=router)
    requests = _requests(target, 512, NUM_STREAMS, rng, stream=True)
    cpu_s, began = _cpu_s(process), time.perf_counter()
    _run(closed_loop(target, requests, NUM_STREAMS))
    return _cpu_s(process) - cpu_s, time.perf_counter() - began


# Fairness ----------------------------------------------------------------------------------------------


def _fairness(cpu: int, is_quick: bool) -> Figure:
    """Two jobs, one with ten times the requests, equal weights: tokens each got while both had work."""
    offered = {"big": 200, "small": 20}
    rounds = 3 if is_quick else 10
    with (
        _stub(num_chunks=4, delay_ms=10) as worker,
        _router(worker, max(os.sched_getaffinity(0))) as (url, _),
    ):
        got = _run(_compete(url, offered, rounds))
    return Figure(
        name="jain",
        value=jain(got.values()),
        unit="index",
        target=">= 0.95",
        peers={f"tokens of {job}": float(tokens) for job, tokens in got.items()},
    )


async def _compete(url: str, offered: dict[str, int], rounds: int) -> dict[str, int]:
    """Closed loops of both jobs until the small one has had its rounds; tokens per job meanwhile."""
    target, rng = Target(url=url), random.Random(0)
    small = [
        request.replace(b"X-Session", b"X-Rose-Job: small\r\nX-Session")
        for request in _requests(target, 64, offered["small"] * rounds, rng)
    ]
    big = [
        request.replace(b"X-Session", b"X-Rose-Job: big\r\nX-Session")
        for request in _requests(target, 64, offered["big"], rng)
    ]
    flood = asyncio.create_task(closed_loop(target, big * 1000, offered["big"]))
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


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[,PATH]=COMMAND",
        help="a router to run beside ours",
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
