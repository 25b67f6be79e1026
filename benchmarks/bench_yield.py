"""Measures how soon an engine with async scheduling gives the GPU to the engine beside it.

`yield_ms[async, serving]`: a serving engine always has work, with two steps in flight while nobody wants its
GPU, and a rollout request comes to the other engine now and then. `yield_ms[async, rollout]`: the other way
round. The time is taken from the end of the step that ran when the request came, until the other engine had
the claim on the GPU. One more step may be queued behind the one that ran. The value is the time beyond that
queued step's own length: P99 and, beside it, P50. Its target is 2 ms. Beside it: the time with the queued
step, and the length of a step.

Serving's TPOT target is so high that there is always slack, and its load prefills seldom: how long the gate
waits for slack or for prefills (docs/gate.md) is another question.

Both engines are real, in processes of their own, with vLLM's async scheduling, on devices that imitate a
GPU's lateness (tests/engine). `wait_ms` counts from the request on.

    python benchmarks/bench_yield.py --quick
"""

import argparse
import importlib
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from lib.harness import run_benchmark

from rose.errors import WorkerError
from rose.measure.figures import Figure, percentile
from rose.memory.daemon.daemon import start_daemon
from rose.types import Role

ENGINES = Path(__file__).resolve().parents[1] / "tests" / "engine"
NUM_ASKS, QUICK_ASKS = 200, 40
NUM_PROMPTS = 6
MAX_TOKENS = 250
TPOT_TARGET_MS = 1800.0
"""So high that there is always slack for a rollout step, and serving waits for none to gather."""
NUM_SLABS, HEADROOM_SLABS, SLAB_BYTES = 48, 6, 512 << 10
SPARE_S = 0.002


def measure(args: argparse.Namespace) -> list[Figure]:
    sys.path.append(str(ENGINES))
    num_asks = QUICK_ASKS if args.quick else NUM_ASKS
    with TemporaryDirectory(prefix="rose-bench-") as folder:
        pair = _Pair(Path(folder), args.seed)
        return [figure for role in Role for figure in pair.figures(role, num_asks)]


class _Pair:
    """Forked engines of the tests. Their modules import vLLM, so they are loaded when a run begins."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder / "engines"
        self._seed = seed
        names = ("async_pair", "forked_engines", "preloaded", "probes", "real_engine", "tiny_models")
        self._tests = {name: importlib.import_module(name) for name in names}
        prompt = self._tests["probes"].prompt
        self._prompts = [prompt(f"yield-{seed}-{index}", 60 + 30 * index) for index in range(NUM_PROMPTS)]
        self._model = self._tests["tiny_models"].make_rollout_model(folder / "model")

    def figures(self, giver: Role, num_asks: int) -> list[Figure]:
        working, asking = self._run(giver, num_asks)
        beyond_s = self._tests["async_pair"].seconds_beyond_step
        if overlaps := self._tests["async_pair"].num_overlaps(working.steps, asking.steps):
            raise WorkerError(f"{overlaps} steps of the two engines ran at the same time")
        steps_ms = [1e3 * (end_s - begin_s) for begin_s, end_s in working.steps]
        beyond_ms = [1e3 * beyond_s(wish, working.steps) for wish in asking.asked]
        queued = [self._tests["async_pair"].steps_after_wish(wish, working.steps) for wish in asking.asked]
        queued_ms = [1e3 * (steps[0][1] - steps[0][0]) if steps else 0.0 for steps in queued]
        over_ms = [beyond - behind for beyond, behind in zip(beyond_ms, queued_ms, strict=True)]
        waits_ms = [1e3 * (wish.began_s - wish.asked_s) for wish in asking.asked]
        step_ms = median(steps_ms)
        name = f"async, {giver.value}"
        return [
            Figure(
                name=f"yield_ms[{name}]",
                value=percentile(over_ms, 99),
                unit="ms over a step",
                target=f"<= {1e3 * SPARE_S:.0f}",
                peers={
                    "P50": percentile(over_ms, 50),
                    "with the queued step, P50": percentile(beyond_ms, 50),
                    "P99": percentile(beyond_ms, 99),
                    "a step": step_ms,
                    "most steps after a wish": max(map(len, queued)),
                    "most in flight": working.most_in_flight,
                },
                spread=(min(over_ms), max(over_ms)),
            ),
            Figure(
                name=f"wait_ms[{name}]",
                value=percentile(waits_ms, 99),
                unit="ms",
                peers={"P50": percentile(waits_ms, 50), "steps, P99": percentile(steps_ms, 99)},
                spread=(min(waits_ms), max(waits_ms)),
            ),
        ]

    def _run(self, giver: Role, num_asks: int) -> tuple[Any, Any]:
        """The parts of the engine that always has work and of the one that asks."""
        asker = next(role for role in Role if role is not giver)
        events = {name: self._tests["preloaded"].FORKS.Event() for name in ("ready", "begin", "stop", "done")}
        engines, pool = self._tests["async_pair"], f"yield-{giver.value}"
        folder = self._folder / giver.value
        self._folder.mkdir(exist_ok=True)
        pair = engines.Pair(model=self._model, pool=pool, tpot_target_ms=TPOT_TARGET_MS, **events)
        given = {"pair": pair, "prompts": self._prompts, "max_tokens": MAX_TOKENS}
        with (
            self._tests["forked_engines"].forks(folder) as run,
            start_daemon(
                pool,
                num_slabs=NUM_SLABS,
                slab_bytes=SLAB_BYTES,
                headroom_slabs=HEADROOM_SLABS,
                runtime_dir=self._tests["real_engine"].runtime_dir(folder),
            ),
        ):
            working = run(engines.work_on, role=giver, **given)
            asking = run(engines.ask_now_and_then, role=asker, num_asks=num_asks, seed=self._seed, **given)
            asked = asking.result()
            return working.result(), asked


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
