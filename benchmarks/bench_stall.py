"""An engine stalls for a weight update as long as its weights take to load, and no longer.

One rollout engine with a random model in float32 streams the tokens of one request, and gets two checkpoints
in turn. `engine_stall`: the longest pause between two tokens while an update is under way, less the usual
one. It contains vLLM's pause, the loading, and computing the request's prefix again after the prefix cache
was dropped. Beside it stands the time of the loading alone (the same engine reads the same staged file when
it is activated), of the whole call, in which the file is checked first, and of that check alone.

    python benchmarks/bench_stall.py --quick --json stall.json
"""

import argparse
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from lib.engines.lone import VOCABULARY, LoneModel, lone_engine, write_model
from lib.engines.token_stream import TokenStream
from lib.harness import median_figure, run_benchmark

from rose.http import http_client
from rose.measure.figures import Figure
from rose.messages import WeightUpdate
from rose.node.control import EngineControl
from rose.transfer.format.checkpoint import checkpoint_state_hash

SIZE = LoneModel(hidden=1024, layers=6, slab_bytes=4 << 20)
PROMPT_TOKENS = 100
TOKENS_AROUND = 8
CYCLES, QUICK_CYCLES = 20, 5
TRL_S = 1.1
"""The figure that was published for a model of 0.6 billion weights."""


def measure(args: argparse.Namespace) -> list[Figure]:
    with TemporaryDirectory(prefix="rose-bench-", dir="/dev/shm") as folder:
        models = [write_model(Path(folder) / name, SIZE, args.seed + at) for at, name in enumerate("ab")]
        files = [next(model.glob("*.safetensors")) for model in models]
        hashes = [str(checkpoint_state_hash(file)) for file in files]
        updates = [
            WeightUpdate(version=f"bench/{at}", path=str(file), state_hash=state_hash)
            for at, (file, state_hash) in enumerate(zip(files, hashes, strict=True))
        ]
        with lone_engine(models[0], SIZE.slab_bytes, num_requests=1) as (engine, _):
            rng = Random(args.seed)
            prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
            engine.complete([prompt], TOKENS_AROUND)
            cycles = QUICK_CYCLES if args.quick else CYCLES
            return _figures(engine, prompt, updates, cycles)


def _figures(
    engine: EngineControl, prompt: list[int], updates: list[WeightUpdate], cycles: int
) -> list[Figure]:
    stalls: list[float] = []
    calls: list[float] = []
    applies: list[float] = []
    checks: list[float] = []
    for number in range(cycles):
        update = updates[(number + 1) % len(updates)]
        stall_s, call_s = _update(engine, prompt, update)
        stalls.append(stall_s)
        calls.append(call_s)
        engine.deactivate()
        applies.append(engine.activate().took_s)
        started_s = time.monotonic()
        checkpoint_state_hash(Path(update.path))
        checks.append(time.monotonic() - started_s)
    weights_bytes = engine.status().device_weights_bytes
    beside: dict[str, float | None] = {
        "loading alone": statistics.median(applies),
        "whole call": statistics.median(calls),
        "check, while it runs": statistics.median(checks),
        "bytes of weights": weights_bytes,
        "TRL, 0.6B": TRL_S,
    }
    ratios = [stall_s / apply_s for stall_s, apply_s in zip(stalls, applies, strict=True)]
    return [
        median_figure("engine_stall", stalls, "s", peers=beside),
        median_figure("engine_stall_over_loading", ratios, "ratio", target="<= 1"),
    ]


def _update(engine: EngineControl, prompt: list[int], update: WeightUpdate) -> tuple[float, float]:
    """(the longest pause between tokens less the median one, how long the call took)."""
    with (
        http_client(engine.url, key=None, timeout=120.0) as client,
        TokenStream(engine, prompt) as stream,
    ):
        stream.wait_for(TOKENS_AROUND)
        started_s = time.monotonic()
        client.post("/rose/v1/weights", json=update.model_dump()).raise_for_status()
        ended_s = time.monotonic()
        stream.wait_for(len(stream.times_s) + TOKENS_AROUND)
        times_s = list(stream.times_s)
    gaps = [(b - a, a, b) for a, b in pairwise(times_s)]
    under_way = [gap for gap, begin, end in gaps if end > started_s and begin < ended_s]
    return max(under_way) - statistics.median(gap for gap, _, _ in gaps), ended_s - started_s


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
