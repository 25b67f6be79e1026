"""The router costs little: latency and CPU per request and per chunk, against a stub worker.

Router, stub and client are processes of their own. The router is pinned to the last CPU, client and stub
share the others. Peers run one after the other on the same CPU against the same stub:

    --peer 'vllm-router=BIN/vllm-router --worker-urls {worker} --host 127.0.0.1 --port {port}'
    --peer 'sglang-router,/generate=BIN/python -m sglang_router.launch_router --worker-urls {worker}
            --host 127.0.0.1 --port {port}'

Peers pass an answer through; the router streams from its worker and keeps the tokens, to resume the turn
elsewhere. Bodies: token ids, 0.7 KB, 48 KB (8k ids), 190 KB (32k ids). The stub answers 64 tokens in 4
chunks, and spares the router the prompt's ids, as ROSE's engines do. A stock vLLM echoes them: what that
costs stands beside cpu_ms_32k.

Beside ours stands what a bare pass-through of the same bytes costs, aiohttp on both sides and nothing
in between (bare_passthrough.py): "aiohttp floor".

  added_latency[decision_p99]   a turn's placement among 16 workers, as the router asks for it
  added_latency[decision_p99,queued]   the same by way of the queue and its fair order
  added_latency[p99,48KB]       P99 through the router less P99 direct, 50 req/s each, in turn with the floor
                                (router_latency.py: what is in it and what not)
  cpu_ms[0.7KB], [48KB], cpu_ms_32k   CPU of the router process per request, 8 at a time
  cpu_us_chunk                  CPU per chunk of 16 tokens to streaming clients, 384 streams at a time, all of
                                their requests' CPU included
  cores_384_streams             CPU while 384 streams get 2 chunks a second each (30 tokens/s)
  jain                          two jobs offering 10:1 on one worker: Jain's index of tokens per entitlement

    python benchmarks/bench_router.py --json router.json
"""

import argparse
import os
import random
import sys
from statistics import median

import psutil
from harness import run_benchmark
from requests_load import Target, closed_loop
from router_decision import decision
from router_latency import latencies
from router_rig import (
    BODIES,
    FLOOR_COMMAND,
    add_peers,
    cpu_s,
    other_router,
    peer_name,
    peer_path,
    requests_for,
    router,
    run,
    stub,
)
from router_streams import fairness, streams

from rose.demo.figures import Figure


def measure(args: argparse.Namespace) -> list[Figure]:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:-1] or cpus)
    try:
        return _measure(args, cpus[-1])
    finally:
        os.sched_setaffinity(0, cpus)


def _measure(args: argparse.Namespace, cpu: int) -> list[Figure]:
    num_decisions = 2_000 if args.quick else 20_000
    figures = [decision(num_decisions, is_queued=is_queued) for is_queued in (False, True)]
    rng = random.Random(args.seed)
    figures += latencies(cpu, rng, args.quick)
    with stub(num_chunks=4) as (worker, _), router(worker, cpu) as (url, process):
        ours = _cpu_per_request(Target(url=url), process, rng, args.quick)
    peers: dict[str, dict[str, float | None]] = {name: {} for name in BODIES}
    with stub(num_chunks=4, stock=True) as (worker, _), router(worker, cpu) as (url, process):
        peers["190KB"]["ids echoed"] = median(_cpu(Target(url=url), process, "190KB", rng, args.quick))
    for spec in (FLOOR_COMMAND, *args.peer):
        for name, value in _peer(spec, cpu, rng, args.quick).items():
            peers[name][peer_name(spec)] = value
    figures += [_cpu_figure(name, values, peers[name]) for name, values in ours.items()]
    figures += streams(cpu, args.quick)
    return [*figures, fairness(args.quick)]


def _cpu_per_request(
    target: Target, process: psutil.Process, rng: random.Random, is_quick: bool
) -> dict[str, list[float]]:
    return {body: _cpu(target, process, body, rng, is_quick) for body in BODIES}


def _cpu(
    target: Target, process: psutil.Process, body: str, rng: random.Random, is_quick: bool
) -> list[float]:
    """Milliseconds of CPU per request, in three rounds."""
    num_tokens = BODIES[body]
    count = (400 if is_quick else 2_000) if num_tokens < 30_000 else (150 if is_quick else 600)
    run(closed_loop(target, requests_for(target, num_tokens, 20, rng), 8))
    found = []
    for _ in range(3):
        requests = requests_for(target, num_tokens, count // 3, rng)
        before = cpu_s(process)
        run(closed_loop(target, requests, 8))
        found.append(1000 * (cpu_s(process) - before) / len(requests))
    return found


def _cpu_figure(name: str, values: list[float], peers: dict[str, float | None]) -> Figure:
    return Figure(
        name="cpu_ms_32k" if name == "190KB" else f"cpu_ms[{name}]",
        value=median(values),
        unit="ms",
        target="<= 0.5" if name == "190KB" else None,
        peers=peers,
        spread=(min(values), max(values)),
    )


def _peer(spec: str, cpu: int, rng: random.Random, is_quick: bool) -> dict[str, float]:
    """A peer's CPU per request, by body."""
    with stub(num_chunks=4) as (worker, _), other_router(spec, [worker], cpu) as (url, process):
        values = _cpu_per_request(Target(url=url, path=peer_path(spec)), process, rng, is_quick)
    return {body: median(each) for body, each in values.items()}


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, add_peers))
