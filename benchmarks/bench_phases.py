"""A prefiller and a decoder keep the SLO of their phase, and each lets rollouts go first by its slack.

Two real engines with vLLM's NixlConnector, each with a rollout engine in a pool of its own: four engines on
this machine's cores. Each has an SLO of 2 s for its own phase, and one for the other phase that no step could
keep. The prefiller spends TTFT slack (gate `ttft-only`), the decoder TPOT slack (`dual`, target 300 ms). No
engine has a profile, so each learns from its own steps how long they take. Prompts come one at a time.

`slo_kept[PHASE]`: the share of requests within the phase's SLO. `let_go_first[PHASE]`: rollout steps that
began while the engine had work of its own and slack. `answers_equal[phases]`: the share of the decoder's
answers that are token for token stock vLLM's; prompts that rounding decides are left out.

The engines are those of tests/engine.

    python benchmarks/bench_phases.py --quick
    python benchmarks/bench_phases.py --json phases.json
"""

import argparse
import importlib
import sys
from contextlib import ExitStack
from itertools import chain, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench_moves import CLEAR_MARGIN, ENGINES
from lib.harness import run_benchmark

from rose.measure.figures import Figure

POOLS = {"prefill": "ttft-only", "decode": None}
"""The gate of each pool's rollout engine, where serving's does not say it all."""
SIZE = {"num_slabs": 24, "headroom_slabs": 6}
NUM_PROMPTS, QUICK_PROMPTS = 24, 6
NUM_AT_ONCE = 3
"""The decoder has the next ones prefilled once it has answered these."""
MAX_TOKENS, ROLLOUT_TOKENS = 24, 60


def measure(args: argparse.Namespace) -> list[Figure]:
    sys.path.append(str(ENGINES))
    names = ("engine_runs", "forked_engines", "phase_runs", "prefill_decode_runs", "preloaded", "probes")
    tests = {name: importlib.import_module(name) for name in (*names, "tiny_models")}
    num_prompts = QUICK_PROMPTS if args.quick else NUM_PROMPTS
    with TemporaryDirectory(prefix="rose-bench-") as made:
        return _Phases(Path(made), tests, args.seed).figures(num_prompts)


class _Phases:
    """The models, and the engines of one run."""

    def __init__(self, folder: Path, tests: dict[str, Any], seed: int) -> None:
        self._folder, self._tests, self._seed = folder, tests, seed
        self._serving = tests["tiny_models"].make_serving_model(folder / "serving")
        self._rollout = tests["tiny_models"].make_rollout_model(folder / "rollout")

    def figures(self, num_prompts: int) -> list[Figure]:
        prompts, expected = self._stock(num_prompts + NUM_AT_ONCE)
        rounds = [prompts[at : at + NUM_AT_ONCE] for at in range(0, len(prompts), NUM_AT_ONCE)]
        phases = self._run(rounds)
        asked = chain(rounds[0], cycle(chain.from_iterable(rounds[1:])))
        replies = chain.from_iterable(phases["decode"].replies)
        equal = [reply.tokens == expected[tuple(one)] for one, reply in zip(asked, replies, strict=False)]
        slo_ms = self._tests["phase_runs"].SLO_MS
        figures = [
            Figure(
                name="answers_equal[phases]",
                value=sum(equal) / len(equal),
                unit="share",
                target="== 1",
                peers={"answers": len(equal)},
            )
        ]
        for name, phase in phases.items():
            latencies_ms = sorted(1000 * max(one.ttft_s, one.tpot_s) for one in phase.delays)
            figures += [
                Figure(
                    name=f"slo_kept[{name}]",
                    value=sum(latency_ms <= slo_ms for latency_ms in latencies_ms) / len(latencies_ms),
                    unit="share",
                    target=">= 0.99",
                    peers={
                        "requests": len(latencies_ms),
                        "median ms": latencies_ms[len(latencies_ms) // 2],
                        "longest ms": latencies_ms[-1],
                    },
                ),
                Figure(
                    name=f"let_go_first[{name}]", value=phase.num_let_go_first, unit="steps", target=">= 1"
                ),
            ]
        return figures

    def _stock(self, num_prompts: int) -> tuple[list[list[int]], dict[tuple[int, ...], list[int]]]:
        """Returns prompts, and stock vLLM's answer to each."""
        runs, prompt = self._tests["engine_runs"], self._tests["probes"].prompt
        drawn = [
            prompt(f"phase-{self._seed}-{index}", 200 + 130 * index // num_prompts)
            for index in range(num_prompts)
        ]
        given: dict[str, Any] = {"model": self._serving, "max_tokens": MAX_TOKENS}
        with self._tests["forked_engines"].forks(self._folder / "stock") as fork:
            margins = fork(runs.stock_margins, prompts=drawn, **given).result()
            prompts = [one for one, nats in zip(drawn, margins, strict=True) if nats >= CLEAR_MARGIN]
            answers = fork(runs.stock_answers, prompts=prompts, **given).result()
        return prompts, dict(zip(map(tuple, prompts), answers, strict=True))

    def _run(self, rounds: list[list[list[int]]]) -> dict[str, Any]:
        """Has the engines answer the rounds, the first one with the default gate; returns what each did."""
        forked, runs = self._tests["forked_engines"], self._tests["phase_runs"]
        events = self._tests["preloaded"].FORKS
        line = runs.Line(asked=events.Queue(), told=events.Queue())
        spends, stop, lets = events.Event(), events.Event(), [events.Event() for _ in POOLS]
        given = {"model": self._serving, "line": line, "spends": spends}
        rolled = [self._tests["probes"].prompt(f"rolled-{index}", 300 + 12 * index) for index in range(10)]
        with ExitStack() as stack:
            forks = {
                pool: stack.enter_context(forked.forks_in_pool(self._folder / pool, pool, **SIZE))
                for pool in POOLS
            }
            rollouts = [
                forks[pool](
                    self._tests["prefill_decode_runs"].roll_out,
                    model=self._rollout,
                    pool=pool,
                    prompts=rolled,
                    max_tokens=ROLLOUT_TOKENS,
                    stop=stop,
                    gate=gate,
                )
                for pool, gate in POOLS.items()
            ]
            prefiller = forks["prefill"](runs.prefill, **given, pool="prefill", lets=lets[0], stop=stop)
            decoder = forks["decode"](
                runs.decode, **given, pool="decode", lets=lets, idle=rounds[0], spending=rounds[1:]
            )
            decoded = decoder.result()
            stop.set()
            for each in rollouts:
                each.result()
            return {"prefill": prefiller.result(), "decode": decoded}


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, measure))
