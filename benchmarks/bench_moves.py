"""Greedy answers stay stock vLLM's over thousands of moves of slabs, whatever of vLLM's features is on.

`greedy_equal_moves[FEATURE]`: the share of answers that are token for token stock vLLM's, an answer that a
cut ended as far as it came. A rollout engine is alone in its pool. In each round it gets all prompts at
once (delta_net: one after the other), and in the midst of decoding it loses half of the slabs that it uses;
the next round gets them back. A slab that leaves is overwritten with NaN. Rounds go on until slabs have
changed hands 1,000 times for each feature; with `--quick`, 60 times. Beside it: how many answers were
compared and came whole, and the moves.

    sync, async      dense attention, without and with async scheduling
    mamba2, parallel, delta_net   states beside attention (Granite, Falcon-H1, Qwen3-Next), prefix cache on
    draft_model      dense attention, three draft tokens of another model, with async scheduling

Engines with async scheduling compute on a device that imitates a GPU's lateness. The engines are those of
tests/engine, which also hold moves beside serving engines, over two ranks, with Model Runner V2 and with
NIXL's connector.

    python benchmarks/bench_moves.py --quick
    python benchmarks/bench_moves.py --only mamba2 delta_net --json moves.json
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lib.harness import run_benchmark

from rose.measure.figures import Figure
from rose.memory.daemon.daemon import start_daemon

ENGINES = Path(__file__).resolve().parents[1] / "tests" / "engine"
NUM_MOVES, QUICK_MOVES = 1000, 60
NUM_PROMPTS = 8
MAX_TOKENS = 40
NUM_DRAFTS = 3
NUM_SLABS, HEADROOM_SLABS = 24, 6
SMALL_SLAB, SLAB, WIDE_SLAB = 256 << 10, 512 << 10, 768 << 10
CACHED = {"prefix_match_unit": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """An engine that one of the features is on in."""

    make_model: str
    """The function of tests/engine/tiny_models.py."""
    slab_bytes: int = SLAB
    is_late: bool = False
    """Whether scheduling is async, on the late device."""
    has_drafter: bool = False
    stock: dict[str, Any] = field(default_factory=dict)
    """Arguments of the stock engine and of the one under test."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine under test alone."""


FEATURES = {
    "sync": Feature(make_model="make_rollout_model"),
    "async": Feature(make_model="make_rollout_model", is_late=True),
    "mamba2": Feature(make_model="make_mamba_model", slab_bytes=SMALL_SLAB, is_late=True, args=CACHED),
    "parallel": Feature(make_model="make_parallel_model", args=CACHED),
    "delta_net": Feature(
        make_model="make_delta_net_model",
        slab_bytes=WIDE_SLAB,
        # In bfloat16, stock vLLM's answers change with the batch.
        stock={"num_at_once": 1, "dtype": "bfloat16"},
    ),
    "draft_model": Feature(make_model="make_rollout_model", is_late=True, has_drafter=True),
}


def measure(args: argparse.Namespace) -> list[Figure]:
    sys.path.append(str(ENGINES))
    num_moves = QUICK_MOVES if args.quick else NUM_MOVES
    with TemporaryDirectory(prefix="rose-bench-") as folder:
        runs = _Runs(Path(folder), args.seed)
        with runs.forks() as run:
            return [runs.figure(run, name, num_moves) for name in args.only]


class _Runs:
    """Forked engines of the tests. Their modules import vLLM, so they are loaded when a run begins."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder / "engines"
        self._tests = {
            name: importlib.import_module(name)
            for name in (
                "async_runs",
                "engine_runs",
                "forked_engines",
                "probes",
                "real_engine",
                "tiny_models",
            )
        }
        prompt = self._tests["probes"].prompt
        shared = prompt(f"shared-{seed}", 88)
        self._prompts = [shared + prompt(f"moved-{seed}-{index}", 30 * index) for index in range(NUM_PROMPTS)]

    def forks(self) -> Any:
        return self._tests["forked_engines"].forks(self._folder)

    def figure(self, run: Callable[..., Any], name: str, num_moves: int) -> Figure:
        feature = FEATURES[name]
        model = self._model(name, feature.make_model)
        given = {"model": model, "prompts": self._prompts, "max_tokens": MAX_TOKENS, **feature.stock}
        stock = run(self._tests["engine_runs"].stock_answers, **given)
        with start_daemon(
            name,
            num_slabs=NUM_SLABS,
            slab_bytes=feature.slab_bytes,
            headroom_slabs=HEADROOM_SLABS,
            runtime_dir=self._tests["real_engine"].runtime_dir(self._folder),
        ):
            moves = self._over_cuts(run, feature, pool=name, num_rounds=1, num_moves=num_moves, **given)
        expected = stock.result()
        answers = [pair for replies in moves.replies for pair in zip(replies, expected, strict=True)]
        equal = sum(reply.tokens == tokens[: len(reply.tokens)] for reply, tokens in answers)
        whole = sum(reply.finish_reason == "length" for reply, _ in answers)
        return Figure(
            name=f"greedy_equal_moves[{name}]",
            value=equal / len(answers),
            unit="share",
            target="== 1",
            peers={"moves": moves.num_moves, "answers": len(answers), "whole answers": whole},
        )

    def _over_cuts(self, run: Callable[..., Any], feature: Feature, **given: Any) -> Any:
        given |= feature.args
        if feature.has_drafter:
            drafter = self._model("drafter", "make_rollout_model", version=1)
            given["speculative_config"] = {
                "method": "draft_model",
                "model": str(drafter),
                "num_speculative_tokens": NUM_DRAFTS,
            }
        if not feature.is_late:
            given.setdefault("num_at_once", NUM_PROMPTS)
            return run(self._tests["engine_runs"].answer_over_cuts, **given).result()
        late = run(self._tests["async_runs"].answer_over_cuts_late, **given).result()
        assert late.most_in_flight > 1, "steps were not queued behind each other"
        return late.moves

    def _model(self, name: str, make: str, **how: Any) -> Path:
        folder: Path = getattr(self._tests["tiny_models"], make)(self._folder / f"model-{name}", **how)
        return folder


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", nargs="+", choices=FEATURES, default=list(FEATURES), metavar="FEATURE", help="these alone"
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, measure, _add_arguments))
