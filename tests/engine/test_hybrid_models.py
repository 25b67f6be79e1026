"""Models with states beside attention, while slabs come and go under real engines: stock vLLM's tokens."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import async_runs
import engine_runs
import pytest
from forked_engines import Fork
from preloaded import FORKS
from probes import prompt
from real_engine import runtime_dir
from references import ModelDirs
from test_models_in_slabs import HEADROOM_SLABS, NUM_SLABS, assert_greedy
from tiny_models import SLAB_BYTES, make_convolution_model, make_delta_net_model, make_mamba_model

from rose.memory.daemon.daemon import start_daemon

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(f"hybrid-{index}", 90 + 40 * index) for index in range(6)]
TOKENS = 40
LONG = [prompt(f"long-hybrid-{index}", 300 + 20 * index) for index in range(10)]
LONG_TOKENS = 60
NUM_ROUNDS = 3
SMALL_SLAB = 256 << 10
DELTA_NET_SLAB = 768 << 10
CACHED = {"enable_prefix_caching": True}
PARTLY_CACHED = {**CACHED, "prefix_match_unit": 16}
"""Prefixes are found in steps of 16 tokens, so most end inside a block, which is then copied."""
UNCACHED = {"enable_prefix_caching": False}
POOL_NUMBERS = count()

Run = Callable[..., Fork]
NewPool = Callable[[int], str]


class Models:
    def __init__(self, folder: Path) -> None:
        self.mamba = make_mamba_model(folder / "mamba")
        self.convolution = make_convolution_model(folder / "convolution")
        self.delta_net = make_delta_net_model(folder / "delta-net")


@pytest.fixture(scope="module")
def hybrids(engines_dir: Path) -> Models:
    return Models(engines_dir / "hybrid-models")


@pytest.fixture(scope="module")
def run(engines_dir: Path) -> Iterator[Run]:
    folder = engines_dir / "hybrids"
    folder.mkdir()
    with ExitStack() as undo:

        def start(function: Callable[..., Any], **arguments: Any) -> Fork:
            fork = Fork(folder, function, **arguments)
            undo.callback(fork.stop)
            return fork

        yield start


@pytest.fixture(scope="module")
def new_pool(run: Run, engines_dir: Path) -> Iterator[NewPool]:
    with ExitStack() as undo:

        def start(slab_bytes: int) -> str:
            name = f"hybrid-{next(POOL_NUMBERS)}"
            daemon = start_daemon(
                name,
                num_slabs=NUM_SLABS,
                slab_bytes=slab_bytes,
                headroom_slabs=HEADROOM_SLABS,
                runtime_dir=runtime_dir(engines_dir / "hybrids"),
            )
            undo.callback(daemon.stop)
            return name

        yield start


@pytest.fixture(scope="module")
def mamba_answers(run: Run, hybrids: Models) -> list[list[int]]:
    answers: list[list[int]] = run(
        engine_runs.stock_answers, model=hybrids.mamba, prompts=PROMPTS, max_tokens=TOKENS
    ).result()
    return answers


def moves_of(run: Run, new_pool: NewPool, model: Path, slab_bytes: int, **args: Any) -> engine_runs.Moves:
    fork = run(
        engine_runs.answer_over_cuts,
        **{"prompts": PROMPTS, "max_tokens": TOKENS, "num_rounds": NUM_ROUNDS},
        **{"model": model, "pool": new_pool(slab_bytes), "num_at_once": len(PROMPTS), **args},
    )
    moves: engine_runs.Moves = fork.result()
    return moves


@pytest.mark.parametrize("caching", [UNCACHED, CACHED, PARTLY_CACHED], ids=["uncached", "cached", "copied"])
def test_mamba2_answers_as_stock_while_slabs_leave(
    run: Run, new_pool: NewPool, hybrids: Models, mamba_answers: list[list[int]], caching: dict[str, Any]
) -> None:
    assert_greedy(moves_of(run, new_pool, hybrids.mamba, SMALL_SLAB, **caching), mamba_answers)


def test_mamba2_answers_as_stock_while_slabs_leave_under_steps_in_flight(
    run: Run, new_pool: NewPool, hybrids: Models, mamba_answers: list[list[int]]
) -> None:
    late = run(
        async_runs.answer_over_cuts_late,
        **{"prompts": PROMPTS, "max_tokens": TOKENS, "num_rounds": NUM_ROUNDS},
        **{"model": hybrids.mamba, "pool": new_pool(SMALL_SLAB), **PARTLY_CACHED},
    ).result()
    assert late.most_in_flight == 2
    assert_greedy(late.moves, mamba_answers)


def test_short_convolutions_answer_as_stock_while_slabs_leave(
    run: Run, new_pool: NewPool, hybrids: Models
) -> None:
    given = {"model": hybrids.convolution, "prompts": PROMPTS, "max_tokens": TOKENS}
    stock = run(engine_runs.stock_answers, **given).result()
    assert_greedy(moves_of(run, new_pool, hybrids.convolution, SMALL_SLAB, **CACHED), stock)


def test_gated_delta_nets_answer_as_stock_while_slabs_leave(
    run: Run, new_pool: NewPool, hybrids: Models
) -> None:
    """One prompt at a time: answers of stock vLLM in bfloat16 change with the batch."""
    alone = {"num_at_once": 1, "dtype": "bfloat16"}
    given = {"model": hybrids.delta_net, "prompts": PROMPTS, "max_tokens": TOKENS}
    stock = run(engine_runs.stock_answers, **given, **alone).result()
    assert_greedy(moves_of(run, new_pool, hybrids.delta_net, DELTA_NET_SLAB, **CACHED, **alone), stock)


@pytest.mark.parametrize("is_serving", [False, True], ids=["rolls out", "serves"])
def test_a_hybrid_and_a_dense_model_share_a_pool(
    run: Run, new_pool: NewPool, hybrids: Models, models: ModelDirs, is_serving: bool
) -> None:
    """The comparison of KV events with what is cached is made inside (engine_runs.py)."""
    served, rolled_out = hybrids.mamba, models.untied[0]
    if not is_serving:
        served, rolled_out = models.serving, hybrids.mamba
    shared = {"pool": new_pool(SLAB_BYTES), "burst": FORKS.Event(), "stop": FORKS.Event()}
    rollout = {"model": rolled_out, "prompts": LONG, "max_tokens": LONG_TOKENS}
    serving = {"model": served, "prompts": LONG * 2, "max_tokens": TOKENS}
    pair = run(engine_runs.roll_out_beside_serving, num_rounds=NUM_ROUNDS, **rollout, **shared)
    bursts = run(engine_runs.serve_bursts, **serving, **shared)
    assert_greedy(pair.result().moves, run(engine_runs.stock_answers, **rollout).result())
    answers, expected = bursts.result(), run(engine_runs.stock_answers, **serving).result()
    assert answers == expected * (len(answers) // len(expected)) != []
