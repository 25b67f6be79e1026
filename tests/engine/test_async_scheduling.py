"""Two steps in flight on a device that computes late: stock vLLM's tokens, and turns at steps' edges."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import async_pair
import async_runs
import engine_runs
import pytest
from forked_engines import Fork, forks
from preloaded import FORKS
from probes import prompt
from real_engine import runtime_dir
from references import ModelDirs
from speculative_runs import speculation
from test_models_in_slabs import HEADROOM_SLABS, NUM_SLABS, assert_greedy
from tiny_models import SLAB_BYTES

from rose.memory.daemon.daemon import start_daemon
from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(f"async-{index}", 60 + 30 * index) for index in range(8)]
TOKENS = 40
NUM_ROUNDS = 3
NUM_ASKS = 8
POOL_NUMBERS = count()

Run = Callable[..., Fork]


@pytest.fixture(scope="module")
def run(engines_dir: Path) -> Iterator[Run]:
    """Forks a function of async_runs with the prompts."""
    with forks(engines_dir / "async", prompts=PROMPTS, max_tokens=TOKENS) as start:
        yield start


@pytest.fixture
def pool(run: Run, engines_dir: Path) -> Iterator[str]:
    name = f"async-{next(POOL_NUMBERS)}"
    with start_daemon(
        name,
        num_slabs=NUM_SLABS,
        slab_bytes=SLAB_BYTES,
        headroom_slabs=HEADROOM_SLABS,
        runtime_dir=runtime_dir(engines_dir / "async"),
    ):
        yield name


@pytest.fixture(scope="module")
def expected(run: Run, models: ModelDirs) -> list[list[int]]:
    answers: list[list[int]] = run(engine_runs.stock_answers, model=models.untied[0]).result()
    return answers


def test_answers_are_stocks_while_slabs_leave_under_steps_in_flight(
    run: Run, pool: str, models: ModelDirs, expected: list[list[int]]
) -> None:
    arguments = {"model": models.untied[0], "pool": pool, "num_rounds": NUM_ROUNDS}
    late = run(async_runs.answer_over_cuts_late, **arguments).result()
    assert late.most_in_flight == 2
    assert late.num_waits == 0, "slabs leave without a wait for the device"
    assert_greedy(late.moves, expected)


def test_answers_of_two_ranks_are_stocks_while_slabs_leave_under_steps_in_flight(
    run: Run, engines_dir: Path, models: ModelDirs, expected: list[list[int]]
) -> None:
    with start_daemon(
        "async-ranks",
        num_slabs=NUM_SLABS,
        num_shards=2,
        slab_bytes=SLAB_BYTES // 2,
        headroom_slabs=HEADROOM_SLABS,
        runtime_dir=runtime_dir(engines_dir / "async"),
    ):
        arguments = {"model": models.untied[0], "pool": "async-ranks", "num_rounds": NUM_ROUNDS}
        late = run(async_runs.answer_over_cuts_on_ranks, **arguments, tensor_parallel_size=2).result()
    assert late.most_in_flight == 2
    assert_greedy(late.moves, expected)


def test_the_late_device_finds_a_missing_fence(run: Run, pool: str, models: ModelDirs) -> None:
    """Without it a step in flight uses memory that has gone, which ends the process."""
    arguments = {"model": models.untied[0], "pool": pool, "num_rounds": NUM_ROUNDS, "is_fenced": False}
    with pytest.raises(AssertionError, match="the process died"):
        run(async_runs.answer_over_cuts_late, **arguments).result()


def test_an_answer_ends_at_its_stop_token_whatever_is_in_flight_behind_it(
    run: Run, pool: str, models: ModelDirs, expected: list[list[int]]
) -> None:
    stops = [tokens[TOKENS // 4 + index] for index, tokens in enumerate(expected)]
    replies = run(async_runs.answer_until_stops, model=models.untied[0], pool=pool, stops=stops).result()
    for reply, tokens, stop in zip(replies, expected, stops, strict=True):
        assert (reply.finish_reason, reply.stop_reason) == ("stop", stop)
        assert reply.tokens == tokens[: tokens.index(stop) + 1]


@pytest.mark.parametrize("method", [None, "draft_model", "ngram"])
def test_serving_drains_to_offer_a_grant_and_only_then(
    run: Run, pool: str, models: ModelDirs, expected: list[list[int]], method: str | None
) -> None:
    """vLLM schedules ngram drafts without async."""
    drafter = models.untied[1] if method == "draft_model" else None
    drafts = speculation(method, drafter) if method is not None else None
    turns = run(async_runs.offer_turns, model=models.untied[0], pool=pool, speculative=drafts).result()
    assert [reply.tokens for reply in turns.replies] == expected
    assert turns.alone_in_flight == (1 if method == "ngram" else 2)
    assert turns.num_overlaps == 0
    assert turns.num_rollout_steps > turns.num_serving_steps / 2


@pytest.mark.parametrize("busy", list(Role))
def test_two_engines_with_async_scheduling_take_turns_at_steps_edges(
    run: Run, pool: str, models: ModelDirs, expected: list[list[int]], busy: Role
) -> None:
    """One always has work, two steps in flight if it serves; the other one asks for the GPU now and then."""
    other = next(role for role in Role if role is not busy)
    events: dict[str, Any] = {name: FORKS.Event() for name in ("ready", "begin", "stop", "done")}
    pair = async_pair.Pair(model=models.untied[0], pool=pool, **events)
    working = run(async_pair.work_on, pair=pair, role=busy)
    asking = run(async_pair.ask_now_and_then, pair=pair, role=other, num_asks=NUM_ASKS, seed=0)
    asker, worker = asking.result(), working.result()
    assert worker.most_in_flight == (2 if busy is Role.SERVING else 1)
    assert len(asker.asked) == NUM_ASKS
    assert (worker.num_grants > 0) == (busy is Role.SERVING)
    # Serving doesn't wait for ever for a rollout step that runs past its predicted end, on a busy machine.
    assert async_pair.num_overlaps(worker.steps, asker.steps) == 0 or worker.num_overruns > 0
    for replies in worker.replies:
        for reply, tokens in zip(replies, expected, strict=True):
            assert reply.tokens == tokens[: len(reply.tokens)]
            assert len(reply.tokens) == TOKENS or busy is Role.ROLLOUT
    for index, (reply,) in enumerate(asker.replies):
        assert reply.tokens == expected[index % len(PROMPTS)][: async_pair.SHORT]
