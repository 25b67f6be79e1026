"""Models with states beside attention, while slabs come and go under real engines: stock vLLM's tokens."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import engine_runs
import pytest
from forked_engines import Fork, forks
from probes import prompt
from real_engine import runtime_dir
from test_models_in_slabs import HEADROOM_SLABS, NUM_SLABS, assert_greedy
from tiny_models import make_delta_net_model, make_mamba_model

from rose.memory.daemon.daemon import start_daemon

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(f"hybrid-{index}", 90 + 40 * index) for index in range(6)]
TOKENS = 40
NUM_ROUNDS = 3
SMALL_SLAB = 256 << 10
DELTA_NET_SLAB = 768 << 10
UNCACHED = {"enable_prefix_caching": False}
POOL_NUMBERS = count()

Run = Callable[..., Fork]
NewPool = Callable[[int], str]


class Models:
    def __init__(self, folder: Path) -> None:
        self.mamba = make_mamba_model(folder / "mamba")
        self.delta_net = make_delta_net_model(folder / "delta-net")


@pytest.fixture(scope="module")
def hybrids(engines_dir: Path) -> Models:
    return Models(engines_dir / "hybrid-models")


@pytest.fixture(scope="module")
def run(engines_dir: Path) -> Iterator[Run]:
    with forks(engines_dir / "hybrids") as start:
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


def test_mamba2_answers_as_stock_while_slabs_leave(
    run: Run, new_pool: NewPool, hybrids: Models, mamba_answers: list[list[int]]
) -> None:
    assert_greedy(moves_of(run, new_pool, hybrids.mamba, SMALL_SLAB, **UNCACHED), mamba_answers)


def test_gated_delta_nets_answer_as_stock_while_slabs_leave(
    run: Run, new_pool: NewPool, hybrids: Models
) -> None:
    """One prompt at a time: answers of stock vLLM in bfloat16 change with the batch."""
    alone = {"num_at_once": 1, "dtype": "bfloat16"}
    given = {"model": hybrids.delta_net, "prompts": PROMPTS, "max_tokens": TOKENS}
    stock = run(engine_runs.stock_answers, **given, **alone).result()
    assert_greedy(moves_of(run, new_pool, hybrids.delta_net, DELTA_NET_SLAB, **UNCACHED, **alone), stock)
