"""Models with states beside attention, while slabs come and go under real engines: stock vLLM's tokens."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import async_runs
import engine_runs
import prefill_decode_runs
import pytest
import speculative_runs
from forked_engines import Fork, forks
from preloaded import FORKS
from probes import prompt
from real_engine import runtime_dir
from test_models_in_slabs import HEADROOM_SLABS, NUM_SLABS, assert_greedy
from tiny_models import (
    BLOCK_TOKENS,
    SLAB_BYTES,
    make_delta_net_model,
    make_mamba_model,
    make_parallel_model,
    make_state_model,
)

from rose.memory.daemon.daemon import start_daemon
from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SHARED = prompt("shared", 88)
PROMPTS = [SHARED + prompt(f"hybrid-{index}", 40 * index) for index in range(6)]
"""They are more than one step takes, so the last ones find the state of the first one's prompt."""
TOKENS = 40
LONG = [SHARED + prompt(f"long-hybrid-{index}", 210 + 20 * index) for index in range(10)]
LONG_TOKENS = 60
NUM_ROUNDS = 3
SMALL_SLAB = 256 << 10
STATE_SLAB = 64 << 10
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
        self.parallel = make_parallel_model(folder / "parallel")
        self.states_alone = make_state_model(folder / "states")
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


@pytest.fixture(scope="module")
def states_alone_answers(run: Run, hybrids: Models) -> list[list[int]]:
    answers: list[list[int]] = run(
        engine_runs.stock_answers, model=hybrids.states_alone, prompts=PROMPTS, max_tokens=TOKENS
    ).result()
    return answers


@pytest.mark.parametrize("caching", [UNCACHED, PARTLY_CACHED], ids=["uncached", "copied"])
def test_mamba2_answers_as_stock_while_slabs_leave_under_steps_in_flight(
    run: Run, new_pool: NewPool, hybrids: Models, mamba_answers: list[list[int]], caching: dict[str, Any]
) -> None:
    late: async_runs.LateMoves = run(
        async_runs.answer_over_cuts_late,
        **{"prompts": PROMPTS, "max_tokens": TOKENS, "num_rounds": NUM_ROUNDS},
        **{"model": hybrids.mamba, "pool": new_pool(SMALL_SLAB), **caching},
    ).result()
    assert late.most_in_flight == 2
    assert_greedy(late.moves, mamba_answers)
    cached = [reply.num_cached_tokens for replies in late.moves.replies for reply in replies]
    assert any(tokens % BLOCK_TOKENS for tokens in cached) == (caching is PARTLY_CACHED)


def test_a_model_of_states_alone_answers_as_stock_while_slabs_leave(
    run: Run, new_pool: NewPool, hybrids: Models, states_alone_answers: list[list[int]]
) -> None:
    given = {"model": hybrids.states_alone, "prompts": PROMPTS, "max_tokens": TOKENS}
    moves = run(
        engine_runs.answer_over_cuts,
        **{**given, **PARTLY_CACHED, "num_rounds": NUM_ROUNDS, "num_at_once": len(PROMPTS)},
        pool=new_pool(STATE_SLAB),
    ).result()
    assert_greedy(moves, states_alone_answers)


def test_gated_delta_nets_answer_as_stock_while_slabs_leave(
    run: Run, new_pool: NewPool, hybrids: Models
) -> None:
    """One prompt at a time: answers of stock vLLM in bfloat16 change with the batch."""
    given = {"model": hybrids.delta_net, "prompts": PROMPTS, "max_tokens": TOKENS}
    alone = {"num_at_once": 1, "dtype": "bfloat16"}
    moves = run(
        engine_runs.answer_over_cuts,
        **{**given, **alone, **CACHED, "num_rounds": NUM_ROUNDS, "pool": new_pool(DELTA_NET_SLAB)},
    ).result()
    assert_greedy(moves, run(engine_runs.stock_answers, **given, **alone).result())


@pytest.mark.parametrize("kind", ["mamba", "states_alone"])
def test_states_with_draft_tokens_answer_as_stock_without_while_slabs_leave(
    run: Run, new_pool: NewPool, hybrids: Models, kind: str, request: pytest.FixtureRequest
) -> None:
    """Rejected drafts leave no trace in a state, wherever its blocks lie."""
    given = {"model": getattr(hybrids, kind), "prompts": PROMPTS, "max_tokens": TOKENS}
    drafted: speculative_runs.Drafted = run(
        speculative_runs.draft_over_cuts,
        **{**given, **UNCACHED, "num_rounds": NUM_ROUNDS, "is_gated": kind == "mamba"},
        speculative=speculative_runs.speculation("ngram"),
        pool=new_pool(SMALL_SLAB if kind == "mamba" else STATE_SLAB),
    ).result()
    assert_greedy(drafted.moves, request.getfixturevalue(f"{kind}_answers"))
    assert drafted.num_drafts > drafted.num_accepted
    assert drafted.num_accepted > 0 or kind == "states_alone", "that model repeats nothing of its prompts"
    assert (drafted.num_granted > 0) == (kind == "mamba")


def test_gated_delta_nets_with_draft_tokens_answer_as_stock_with_the_same_drafts_while_slabs_leave(
    run: Run, new_pool: NewPool, hybrids: Models
) -> None:
    """One prompt at a time: in bfloat16, stock vLLM's answers change with the tokens of a step."""
    alone = {"model": hybrids.delta_net, "prompts": PROMPTS, "max_tokens": TOKENS, "num_at_once": 1}
    given = {**alone, **UNCACHED, "dtype": "bfloat16"}
    ngram = speculative_runs.speculation("ngram")
    drafted: speculative_runs.Drafted = run(
        speculative_runs.draft_over_cuts,
        **{**given, "num_rounds": NUM_ROUNDS, "speculative": ngram},
        pool=new_pool(DELTA_NET_SLAB),
    ).result()
    stock = run(speculative_runs.stock_answers, **given, speculative_config=ngram).result()
    assert_greedy(drafted.moves, stock)
    assert drafted.num_drafts > drafted.num_accepted > 0


def test_two_hybrids_share_a_pool(
    run: Run, new_pool: NewPool, hybrids: Models, mamba_answers: list[list[int]]
) -> None:
    """A Falcon-H1 rolls out beside a Granite, which serves with two steps in flight. KV events are compared
    with what is cached inside (engine_runs.py)."""
    shared = {"pool": new_pool(SLAB_BYTES), "burst": FORKS.Event(), "stop": FORKS.Event()}
    rollout = {"model": hybrids.parallel, "prompts": LONG, "max_tokens": LONG_TOKENS}
    serving = {"model": hybrids.mamba, "prompts": PROMPTS * 4, "max_tokens": TOKENS}
    rolled_out = run(
        engine_runs.roll_out_beside_serving, **rollout, **shared, num_rounds=NUM_ROUNDS, **PARTLY_CACHED
    )
    served = run(async_runs.serve_bursts_late, **serving, **shared, **CACHED)
    assert_greedy(rolled_out.result().moves, run(engine_runs.stock_answers, **rollout).result())
    answers, most_in_flight = served.result()
    assert answers == mamba_answers * (len(answers) // len(mamba_answers)) != []
    assert most_in_flight == 2


@pytest.mark.parametrize("role", list(Role))
def test_gated_delta_nets_with_draft_tokens_share_a_pool_with_another_model(
    run: Run, new_pool: NewPool, hybrids: Models, mamba_answers: list[list[int]], role: Role
) -> None:
    """They roll out beside a Granite that serves in bursts, or serve beside one that always rolls out. In the
    smaller slabs, a prompt of theirs needs more than half of the pool."""
    stop, pool = FORKS.Event(), new_pool(DELTA_NET_SLAB if role is Role.ROLLOUT else DELTA_NET_SLAB // 2)
    alone = {"model": hybrids.delta_net, "prompts": PROMPTS, "max_tokens": TOKENS}
    ngram = speculative_runs.speculation("ngram")
    kind = {**UNCACHED, "dtype": "bfloat16"}
    beside: dict[str, Any] = {"model": hybrids.mamba, "pool": pool, "stop": stop, "max_tokens": TOKENS}
    drafting = {**alone, **kind, "pool": pool, "speculative": ngram, "num_rounds": NUM_ROUNDS}
    if role is Role.ROLLOUT:
        drafting["burst"] = beside["burst"] = FORKS.Event()
        other = run(engine_runs.serve_bursts, **beside, prompts=PROMPTS * 4)
    else:
        other = run(prefill_decode_runs.roll_out, **beside, prompts=PROMPTS * 4)
    drafted: speculative_runs.Drafted = run(
        speculative_runs.draft_beside_another, **drafting, role=role, stop=stop
    ).result()
    stock = run(
        speculative_runs.stock_answers, **alone, **kind, num_at_once=1, speculative_config=ngram
    ).result()
    for replies in drafted.moves.replies:
        for reply, tokens in zip(replies, stock, strict=True):
            assert reply.tokens == tokens[: len(reply.tokens)]
            assert reply.finish_reason == "length" or role is Role.ROLLOUT
    assert drafted.num_drafts > drafted.num_accepted > 0
    assert drafted.moves.num_moves >= len(PROMPTS)
    assert role is Role.ROLLOUT or min(drafted.num_taken) > 0, "each prompt takes slabs from rollouts"
    found = other.result()
    answers = found if role is Role.ROLLOUT else [reply.tokens for each in found.replies for reply in each]
    assert answers
    for index, tokens in enumerate(answers):
        assert tokens == mamba_answers[index % len(PROMPTS)][: len(tokens)]
