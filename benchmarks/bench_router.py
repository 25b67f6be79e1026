"""The router costs little: latency and CPU per request and per chunk, against a stub worker.

Router, stub and client are processes of their own. The router is pinned to the last CPU, client and stub
share the others. For CPU all routers, peers too, are up at once on that CPU, and have their rounds in turn:

    --peer 'vllm-router=BIN/vllm-router --worker-urls {worker} --host 127.0.0.1 --port {port}'
    --peer 'sglang-router,/generate=BIN/python -m sglang_router.launch_router --worker-urls {worker}
            --host 127.0.0.1 --port {port}'

Peers pass an answer through; the router streams from its worker and keeps the tokens, to resume the turn
elsewhere. Bodies: token ids, 0.7 KB, 48 KB (8k ids), 190 KB (32k ids). The stub answers 64 tokens in 4
chunks, and spares the router the prompt's ids, as ROSE's engines do. A stock vLLM echoes them: what that
costs stands beside ours.

Beside ours stands what a bare pass-through of the same bytes costs, aiohttp on both sides and nothing
in between (lib/router/bare_passthrough.py): "aiohttp floor".

  added_latency[decision_p99]   a turn's placement among 16 workers, as the router asks for it
  added_latency[decision_p99,queued]   the same by way of the queue and its fair order
  decide_us[16], [512], [4000]  P99 of a placement's CPU by the number of workers, policy paper
  decide_us[16,cost], ...       the same by policy cost
  session_us[100000], ...       P99 of finding a trajectory by its key and noting a turn, among so many
  session_us[10000,one prefix]  the same without keys, if all prompts begin with the same 2,000 tokens
  heartbeat_cores[16], ...      the router's CPU for the heartbeats of so many idle workers
  added_latency[p99,48KB]       P99 through the router less P99 direct, 50 req/s each, in turn with the floor
                                (lib/router/latency.py: what is in it and what not)
  cpu_ms[0.7KB], [48KB], cpu_ms_32k   CPU of the router process per request, 8 at a time
  cpu_us_chunk                  CPU per chunk of 16 tokens to streaming clients, 384 streams at a time, all of
                                their requests' CPU included
  cores_384_streams             CPU while 384 streams get 2 chunks a second each (30 tokens/s)
  jain                          two jobs offering 10:1 on one worker: Jain's index of tokens per entitlement
  jain_mixed                    the same, where the larger job asks for chats with tools and the other for
                                completions

With --scale only what depends on the number of workers is measured. With --tls the router serves HTTPS, stub
and pass-through stay plain, and the figures that TLS changes are reported without targets. A round of the CPU
figures opens 8 connections, whose handshakes count.

    python benchmarks/bench_router.py --json router.json
    python benchmarks/bench_router.py --scale --json scale.json
    python benchmarks/bench_router.py --tls --json router_tls.json
"""

import argparse
import os
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

import psutil
from lib.harness import run_benchmark
from lib.load.requests import Target, closed_loop
from lib.router.decision import decision, decisions
from lib.router.heartbeats import heartbeats
from lib.router.latency import latencies
from lib.router.rig import (
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
from lib.router.sessions import sessions
from lib.router.streams import fairness, streams

from rose.measure.figures import Figure

_OURS = "ours"
_ECHOED = "ids echoed"
"""Ours before a stock vLLM."""
_ROUNDS = 5


def measure(args: argparse.Namespace) -> list[Figure]:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:-1] or cpus)
    try:
        return _measure(args, cpus[-1])
    finally:
        os.sched_setaffinity(0, cpus)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_peers(parser)
    parser.add_argument("--scale", action="store_true", help="only what depends on the number of workers")
    parser.add_argument("--tls", action="store_true", help="only what TLS changes, behind HTTPS")


def _measure(args: argparse.Namespace, cpu: int) -> list[Figure]:
    if args.tls:
        return _tls_figures(args, cpu)
    num_decisions = 2_000 if args.quick else 20_000
    if args.scale:
        return decisions(num_decisions) + sessions(num_decisions) + heartbeats(cpu, args.quick)
    figures = [decision(num_decisions, is_queued=is_queued) for is_queued in (False, True)]
    figures += decisions(num_decisions) + sessions(num_decisions) + heartbeats(cpu, args.quick)
    rng = random.Random(args.seed)
    figures += latencies(cpu, rng, args.quick)
    figures += _cpu_figures(cpu, rng, args.peer, args.quick)
    figures += streams(cpu, args.quick)
    return [*figures, fairness(args.quick), fairness(args.quick, is_mixed=True)]


def _tls_figures(args: argparse.Namespace, cpu: int) -> list[Figure]:
    rng = random.Random(args.seed)
    figures = latencies(cpu, rng, args.quick, has_tls=True)
    figures += _cpu_figures(cpu, rng, args.peer, args.quick, has_tls=True)
    figures += streams(cpu, args.quick, has_tls=True)
    return [replace(each, name=f"{each.name}, TLS", target=None) for each in figures]


def _cpu_figures(
    cpu: int, rng: random.Random, peers: Sequence[str], is_quick: bool, *, has_tls: bool = False
) -> list[Figure]:
    """Every way is open all the time and has its rounds in turn: no host is equally fast in every minute."""
    found: dict[str, dict[str, list[float]]] = {body: {} for body in BODIES}
    with ExitStack() as ways:
        worker, _ = ways.enter_context(stub(num_chunks=4))
        stock, _ = ways.enter_context(stub(num_chunks=4, stock=True))
        targets = {}
        for name, behind in ((_OURS, worker), (_ECHOED, stock)):
            url, process = ways.enter_context(router(behind, cpu, has_tls=has_tls))
            targets[name] = (Target(url=url), process)
        for spec in (FLOOR_COMMAND, *peers):
            url, process = ways.enter_context(other_router(spec, [worker], cpu))
            targets[peer_name(spec)] = (Target(url=url, path=peer_path(spec)), process)
        for body, num_tokens in BODIES.items():
            count = (130 if is_quick else 660) if num_tokens < 30_000 else (50 if is_quick else 200)
            for name, (target, _) in targets.items():
                run(closed_loop(target, requests_for(target, num_tokens, 20, rng), 8))
                found[body][name] = []
            for _ in range(_ROUNDS):
                for name, (target, process) in targets.items():
                    found[body][name].append(_cpu_ms(target, process, num_tokens, count, rng))
    return [_cpu_figure(body, values) for body, values in found.items()]


def _cpu_ms(
    target: Target, process: psutil.Process, num_tokens: int, count: int, rng: random.Random
) -> float:
    """Milliseconds of CPU per request, 8 at a time."""
    requests = requests_for(target, num_tokens, count, rng)
    before = cpu_s(process)
    run(closed_loop(target, requests, 8))
    return 1000 * (cpu_s(process) - before) / count


def _cpu_figure(body: str, found: dict[str, list[float]]) -> Figure:
    ours = found.pop(_OURS)
    return Figure(
        name="cpu_ms_32k" if body == "190KB" else f"cpu_ms[{body}]",
        value=median(ours),
        unit="ms",
        target="<= 0.5" if body == "190KB" else None,
        peers={name: median(values) for name, values in found.items()},
        spread=(min(ours), max(ours)),
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
