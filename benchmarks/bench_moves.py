"""Greedy answers equal stock vLLM's while slabs move thousands of times, with each of the features below.

`greedy_equal_moves[FEATURE]` is the share of answers that equal stock vLLM's token for token. An answer that
a cut ended is compared as far as it goes. A rollout engine is alone in its pool. In each round it gets all
prompts at once (delta_net: one after the other), and while it decodes it loses half of the slabs that it
uses. The next round gets them back. A slab that leaves is overwritten with NaN. Rounds go on until slabs have
changed hands 1,000 times for each feature, or 60 times with `--quick`.

Prompts whose greedy tokens depend on float32's rounding, and so on the batch, are left out, except with
delta_net. The table also shows the moves, and how many answers were compared and how many came whole.

    sync, async      dense attention, without and with async scheduling
    mamba2, parallel, delta_net   states beside attention (Granite, Falcon-H1, Qwen3-Next), prefix cache on
    draft_model      dense attention, three draft tokens of another model, with async scheduling
    tp2              two tensor-parallel ranks, with async scheduling; stock vLLM has one rank
    pp2              a pipeline of two stages with one and three layers, and a step in each; stock: one rank
    v2               Model Runner V2, in Triton's interpreter
    nixl             a prefiller and a decoder with vLLM's NixlConnector on a stand-in card, beside rollouts
                     that always want their slabs; the answers are the decoder's and the rollouts'

Engines with async scheduling compute on a device that imitates a GPU's lateness, except those of tp2. In
pp2 the stages have a step each without such a device. The engines are those of tests/engine.

    python benchmarks/bench_moves.py --quick
    python benchmarks/bench_moves.py --only mamba2 delta_net --json moves.json
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lib.harness import run_benchmark

from rose.engine.stock import STOCK_ENV
from rose.errors import WorkerError
from rose.measure.figures import Figure
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from rose.node.processes import ServerProcess

ENGINES = Path(__file__).resolve().parents[1] / "tests" / "engine"
NUM_MOVES, QUICK_MOVES = 1000, 60
NUM_PROMPTS = 8
MAX_TOKENS = 40
NUM_DRAFTS = 3
NUM_SLABS, HEADROOM_SLABS = 24, 6
TINY_SLAB, SMALL_SLAB, SLAB, WIDE_SLAB = 64 << 10, 256 << 10, 512 << 10, 768 << 10
SHORT_BLOCKS = {"block_size": 32}
"""The tokens of a block. vLLM's blocks for the CPU have 128."""
CACHED = {"prefix_match_unit": 16}
CLEAR_MARGIN = 1e-4
"""In nats. It is a hundred times the change of a log probability by float32's rounding."""
PROGRAM_S = 3600.0
"""The most seconds that the engine in a program of its own may take to answer."""
ROUNDS_OF_A_DECODER = 4
"""How often a decoder gets all prompts before another one takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """An engine with one of the features."""

    make_model: str
    """The function of tests/engine/tiny_models.py that makes its model."""
    slab_bytes: int = SLAB
    is_late: bool = False
    """Whether scheduling is async, on the late device."""
    has_drafter: bool = False
    stock: dict[str, Any] = field(default_factory=dict)
    """Arguments of the stock engine and of the one under test."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine under test alone."""
    num_slabs: int = NUM_SLABS
    num_shards: int = 1


FEATURES = {
    "sync": Feature(make_model="make_rollout_model"),
    "async": Feature(make_model="make_rollout_model", is_late=True),
    "mamba2": Feature(make_model="make_mamba_model", slab_bytes=SMALL_SLAB, is_late=True, args=CACHED),
    "parallel": Feature(make_model="make_parallel_model", args=CACHED),
    "delta_net": Feature(
        make_model="make_delta_net_model",
        slab_bytes=WIDE_SLAB,
        # In bfloat16, stock vLLM's answers change with the batch, so there is none.
        stock={"num_at_once": 1, "dtype": "bfloat16"},
    ),
    "draft_model": Feature(make_model="make_rollout_model", is_late=True, has_drafter=True),
    # A step of ranks or of the interpreter takes long, so a round moves many slabs of few tokens each.
    "tp2": Feature(
        make_model="make_rollout_model",
        slab_bytes=TINY_SLAB,
        num_slabs=4 * NUM_SLABS,
        num_shards=2,
        args={"tensor_parallel_size": 2, **SHORT_BLOCKS},
    ),
    "v2": Feature(
        make_model="make_rollout_model", slab_bytes=TINY_SLAB, num_slabs=8 * NUM_SLABS, args=SHORT_BLOCKS
    ),
    "pp2": Feature(
        make_model="make_rollout_model",
        slab_bytes=TINY_SLAB,
        num_slabs=4 * NUM_SLABS,
        num_shards=2,
        args={"pipeline_parallel_size": 2, "layers": "1,3", **SHORT_BLOCKS},
    ),
    "nixl": Feature(make_model="make_serving_model", num_slabs=32),
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
        names = ("async_runs", "engine_runs", "forked_engines", "prefill_decode_runs", "preloaded", "probes")
        self._tests = {
            name: importlib.import_module(name) for name in (*names, "real_engine", "tiny_models", "v2_runs")
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
        if "num_at_once" not in feature.stock:
            given["prompts"] = self._clear_prompts(run, **given)
        stock = run(self._tests["engine_runs"].stock_answers, **given)
        with start_daemon(
            name,
            num_slabs=feature.num_slabs,
            slab_bytes=feature.slab_bytes,
            num_shards=feature.num_shards,
            headroom_slabs=HEADROOM_SLABS,
            runtime_dir=self._tests["real_engine"].runtime_dir(self._folder),
        ):
            if name == "nixl":
                answers, moved = self._beside_a_pair(run, stock, pool=name, num_moves=num_moves, **given)
            else:
                over_cuts = self._in_program if name == "v2" else partial(self._over_cuts, run, feature)
                moves = over_cuts(pool=name, num_moves=num_moves, num_rounds=1, **given, **feature.args)
                answers, moved = _pairs(moves.replies, stock.result()), moves.num_moves
        unequal = [
            (reply, tokens) for reply, tokens in answers if reply.tokens != tokens[: len(reply.tokens)]
        ]
        for reply, tokens in unequal:
            print(f"{name}: stock vLLM answers {tokens}, and the engine answers {reply}", file=sys.stderr)
        return Figure(
            name=f"greedy_equal_moves[{name}]",
            value=1 - len(unequal) / len(answers),
            unit="share",
            target="== 1",
            peers={
                "moves": moved,
                "prompts left out": NUM_PROMPTS - len(given["prompts"]),
                "answers": len(answers),
                "whole answers": sum(reply.finish_reason == "length" for reply, _ in answers),
            },
        )

    def _over_cuts(self, run: Callable[..., Any], feature: Feature, **given: Any) -> Any:
        if feature.has_drafter:
            drafter = self._model("drafter", "make_rollout_model", version=1)
            given["speculative_config"] = {
                "method": "draft_model",
                "model": str(drafter),
                "num_speculative_tokens": NUM_DRAFTS,
            }
        if feature.is_late:
            late = run(self._tests["async_runs"].answer_over_cuts_late, **given).result()
        elif feature.num_shards > 1:
            late = run(self._tests["async_runs"].answer_over_cuts_on_ranks, **given).result()
        else:
            given.setdefault("num_at_once", len(given["prompts"]))
            return run(self._tests["engine_runs"].answer_over_cuts, **given).result()
        if late.most_in_flight < 2:
            raise WorkerError("no step was queued behind another one")
        return late.moves

    def _in_program(self, **given: Any) -> Any:
        """Model Runner V2 is chosen before vLLM is imported, so it runs in a program of its own."""
        v2_runs = self._tests["v2_runs"]
        arguments, found = self._folder / "given.json", self._folder / "found.json"
        arguments.write_text(json.dumps({**given, "model": str(given["model"])}))
        folder = str(self._tests["real_engine"].runtime_dir(self._folder))
        command = [sys.executable, str(ENGINES / "v2_runs.py"), str(arguments), str(found)]
        environment = {"ROSE_RUNTIME_DIR": folder, **STOCK_ENV, **v2_runs.ENV}
        with ServerProcess(command, "v2_runs.py", log_path=None, env=environment) as program:
            if (status := program.wait(PROGRAM_S)) != 0:
                raise WorkerError(f"{program.name}: status {status}, not 0, within {PROGRAM_S:.0f} s")
        return v2_runs.read_moves(json.loads(found.read_text()))

    def _beside_a_pair(
        self, run: Callable[..., Any], stock: Any, *, pool: str, num_moves: int, **given: Any
    ) -> tuple[list[tuple[Any, Any]], int]:
        """Has decoders take their prompts' KV from a prefiller until slabs have moved ``num_moves`` times
        between them and rollouts."""
        events, runs = self._tests["preloaded"].FORKS, self._tests["prefill_decode_runs"]
        line, stop = runs.Line(asked=events.Queue(), told=events.Queue()), events.Event()
        rolled = {"model": self._model("rollout", "make_rollout_model"), "max_tokens": MAX_TOKENS}
        rolled["prompts"] = self._clear_prompts(run, prompts=self._prompts, **rolled)
        prompts = given.pop("prompts")
        work = [(line, prompts * ROUNDS_OF_A_DECODER)]
        rollout = run(runs.roll_out, **rolled, pool=pool, stop=stop)
        rollout_stock = run(self._tests["engine_runs"].stock_answers, **rolled)
        prefiller = run(runs.prefill, model=given["model"], pool=pool, line=line, stop=stop)
        replies: list[list[Any]] = []
        folder = self._tests["real_engine"].runtime_dir(self._folder)
        with PoolClient.observe(pool, runtime_dir=folder) as watcher:

            def num_moved() -> int:
                return sum(watcher.ledger.entry(slab).epoch for slab in range(watcher.num_slabs))

            while not replies or num_moved() < num_moves:
                decoder = run(runs.decode, **given, pool=pool, work=work, has_window=True)
                decoded = decoder.result()
                decoder.stop()
                replies += [decoded[at : at + len(prompts)] for at in range(0, len(decoded), len(prompts))]
        stop.set()
        moves = rollout.result()
        prefiller.result()
        answers = _pairs(replies, stock.result()) + _pairs(moves.replies, rollout_stock.result())
        return answers, moves.num_moves

    def _clear_prompts(self, run: Callable[..., Any], *, prompts: Any, **given: Any) -> list[Any]:
        margins = run(self._tests["engine_runs"].stock_margins, prompts=prompts, **given).result()
        clear = [prompt for prompt, nats in zip(prompts, margins, strict=True) if nats >= CLEAR_MARGIN]
        if len(clear) < NUM_PROMPTS // 2:
            raise WorkerError(f"rounding may decide most of {len(prompts)} answers: margins {margins} nats")
        return clear

    def _model(self, name: str, make: str, **how: Any) -> Path:
        folder: Path = getattr(self._tests["tiny_models"], make)(self._folder / f"model-{name}", **how)
        return folder


def _pairs(rounds: list[list[Any]], expected: list[list[int]]) -> list[tuple[Any, Any]]:
    """Returns each answer of each round, with stock vLLM's."""
    return [pair for replies in rounds for pair in zip(replies, expected, strict=True)]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        nargs="+",
        choices=FEATURES,
        default=list(FEATURES),
        metavar="FEATURE",
        help="the features to test; all by default",
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, measure, _add_arguments))
