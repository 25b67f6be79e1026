"""What the router's memory of trajectories costs when very many are live.

Owns: figures of bench_router.py. Promises: the router's own tables, on this thread. Never: opens a socket.
"""

import random
import time

from rose.measure.figures import Figure, percentile
from rose.scheduler.rollout.formats.bodies import TokenIds
from rose.scheduler.rollout.placing.sessions import (
    Fingerprints,
    Held,
    SessionKeys,
    SessionTable,
    prefix_of,
    scope_of,
)
from rose.scheduler.rollout.router_config import RouterConfig

NUM_LIVE = (1_000, 10_000, 100_000)
PREFIX_TOKENS, ANSWER_TOKENS = 2_000, 64
_SCOPE = scope_of("job", "model")
_INF = float("inf")


def sessions(count: int) -> list[Figure]:
    """Looks up and notes turns of this many sessions: by keys, and by prompts that all begin alike."""
    return [
        *(_figure(f"session_us[{live}]", _keyed(live, count)) for live in NUM_LIVE),
        *(_figure(f"session_us[{live},one prefix]", _by_prefix(live, count)) for live in NUM_LIVE[:2]),
    ]


def _figure(name: str, cpu_s: list[float]) -> Figure:
    p50, p99 = (1e6 * (percentile(cpu_s, percent) or 0.0) for percent in (50, 99))
    return Figure(name=name, value=p99, unit="us", peers={"P50": p50})


def _keyed(live: int, count: int) -> list[float]:
    """Returns the CPU seconds of each turn, once all sessions are live."""
    table, rng = SessionTable(RouterConfig().max_sessions), random.Random(1)
    keys = [f"session-{number}" for number in range(live)]
    said = b"1," * PREFIX_TOKENS
    for key in keys:
        table.record(key, "w:1", None, _held("w:1"), _SCOPE, said)
    cpu_s = []
    for _ in range(count):
        key, worker, began = rng.choice(keys), f"w:{rng.randrange(16)}", time.thread_time()
        session = table.get(key, _SCOPE)
        assert session is not None
        session.is_extended_by(said)
        table.record(key, worker, None, _held(worker), _SCOPE, said)
        cpu_s.append(time.thread_time() - began)
    return cpu_s


def _by_prefix(live: int, count: int) -> list[float]:
    """The same without keys: each session is known by the tokens that its first turn sampled."""
    fingerprints, rng = Fingerprints(live), random.Random(1)
    keys = SessionKeys(fingerprints)
    shared = TokenIds.of([rng.randrange(150_000) for _ in range(PREFIX_TOKENS)])
    prompts = []
    for number in range(live):
        answer = [rng.randrange(150_000) for _ in range(rng.randrange(1, ANSWER_TOKENS))]
        prompts.append(shared.plus([*answer, number]))
        fingerprints.record(prefix_of(prompts[-1]), f"session-{number}", _SCOPE)
    cpu_s = []
    for _ in range(count):
        number = rng.randrange(live)
        prompt, began = prompts[number].plus([7, 8, 9]), time.thread_time()
        assert keys.key(None, prompt, 0, 1, _SCOPE) == f"session-{number}"
        fingerprints.record(prefix_of(prompts[number]), f"session-{number}", _SCOPE)
        cpu_s.append(time.thread_time() - began)
    return cpu_s


def _held(worker: str) -> Held:
    return Held(num_tokens=len(worker), version=None, until=_INF)
