"""Models beyond dense attention, on real engines whose slabs come and go: the same greedy tokens as stock."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import engine_runs
import pytest
from engine_runs import EventChecks, Moves
from forked_engines import Fork
from preloaded import FORKS
from probes import prompt
from real_engine import new_folder, runtime_dir
from references import ModelDirs
from tiny_models import BLOCK_TOKENS, SLAB_BYTES, make_mla_model, make_moe_model, make_window_model

from rose.memory.daemon.daemon import start_daemon
from rose.types import StopReason

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_SLABS = 24
HEADROOM_SLABS = 6
ABORTS = {StopReason.RECLAIMED, StopReason.STALLED}
SERVED = [prompt(f"served-{index}", 250 + 20 * index) for index in range(6)]
SERVED_TOKENS = 24
WINDOWED = [prompt(f"windowed-{index}", 300 + 20 * index) for index in range(10)]
WINDOWED_TOKENS = 60
SHORT = [prompt(f"short-{index}", 60 + 10 * index) for index in range(6)]
SHORT_TOKENS = 40
NUM_ROUNDS = 3


class Runs:
    """All runs of this file, side by side; each with the stock answers to compare with."""

    def __init__(self, folder: Path, models: ModelDirs, undo: ExitStack) -> None:
        self._folder, self._undo = folder, undo
        self._serving = models.serving
        self._dense = models.untied[0]
        self.windows = make_window_model(folder / "windows")
        self.moe, self.mla = make_moe_model(folder / "moe"), make_mla_model(folder / "mla")
        # Kept: a semaphore is gone with its last reference, maybe before a slow process has opened it.
        self._events = {"burst": FORKS.Event(), "stop": FORKS.Event()}
        self.pair = self._fork(
            engine_runs.roll_out_beside_serving,
            model=self.windows,
            pool=self._pool("pair"),
            prompts=WINDOWED,
            max_tokens=WINDOWED_TOKENS,
            num_rounds=NUM_ROUNDS,
            **self._events,
        )
        self.bursts = self._fork(
            engine_runs.serve_bursts,
            model=models.serving,
            pool="pair",
            prompts=SERVED,
            max_tokens=SERVED_TOKENS,
            **self._events,
        )

    def _pool(self, name: str) -> str:
        daemon = start_daemon(
            name,
            num_slabs=NUM_SLABS,
            slab_bytes=SLAB_BYTES,
            headroom_slabs=HEADROOM_SLABS,
            runtime_dir=runtime_dir(self._folder),
        )
        self._undo.callback(daemon.stop)
        return name

    def _fork(self, function: Any, **arguments: Any) -> Fork:
        fork = Fork(self._folder, function, **arguments)
        self._undo.callback(fork.stop)
        return fork

    def stock(
        self, model: Path, prompts: list[list[int]], max_tokens: int, num_at_once: int = 99
    ) -> list[list[int]]:
        run = self._fork(
            engine_runs.stock_answers,
            model=model,
            prompts=prompts,
            max_tokens=max_tokens,
            num_at_once=num_at_once,
        )
        answers: list[list[int]] = run.result()
        return answers

    def served(self) -> tuple[list[list[int]], list[list[int]]]:
        """Serving's answers, all bursts in a row, and stock's for one burst."""
        return self.bursts.result(), self.stock(self._serving, SERVED, SERVED_TOKENS)

    def over_cuts(self, model: Path, num_at_once: int, **args: Any) -> Moves:
        run = self._fork(
            engine_runs.answer_over_cuts,
            model=model,
            pool=self._pool(model.name),
            prompts=SHORT,
            max_tokens=SHORT_TOKENS,
            num_rounds=NUM_ROUNDS,
            num_at_once=num_at_once,
            **args,
        )
        moves: Moves = run.result()
        return moves

    def paused_session(self) -> dict[str, Any]:
        run = self._fork(
            engine_runs.hold_a_paused_session,
            model=self._dense,
            pool=self._pool("sessions"),
            prompt=prompt("session", 3 * BLOCK_TOKENS),
        )
        facts: dict[str, Any] = run.result()
        return facts


@pytest.fixture(scope="module")
def runs(engines_dir: Path, models: ModelDirs) -> Iterator[Runs]:
    with ExitStack() as undo:
        yield Runs(new_folder(engines_dir, "forks"), models, undo)


@pytest.fixture(scope="module")
def windows(runs: Runs) -> EventChecks:
    checks: EventChecks = runs.pair.result()
    return checks


def _first_difference(tokens: list[int], expected: list[int]) -> int:
    return next(at for at, (one, other) in enumerate(zip(tokens, expected, strict=False)) if one != other)


def assert_greedy(moves: Moves, expected: list[list[int]]) -> None:
    """Every answer is stock's, an ended one's as far as it came; some came whole, some were ended."""
    replies = [
        (reply, tokens) for answers in moves.replies for reply, tokens in zip(answers, expected, strict=True)
    ]
    for reply, _ in replies:
        assert reply.finish_reason == "length" or reply.stop_reason in ABORTS
    wrong = [
        (number, _first_difference(reply.tokens, tokens), reply.finish_reason)
        for number, (reply, tokens) in enumerate(replies)
        if reply.tokens != tokens[: len(reply.tokens)]
    ]
    assert not wrong, f"of {len(replies)} replies, (reply, token, end): {wrong}"
    assert {"length", "abort"} == {reply.finish_reason for reply, _ in replies}
    assert moves.num_moves >= NUM_ROUNDS


def test_a_sliding_window_model_answers_as_stock_beside_a_serving_engine(
    runs: Runs, windows: EventChecks
) -> None:
    assert_greedy(windows.moves, runs.stock(runs.windows, WINDOWED, WINDOWED_TOKENS))
    served, expected = runs.served()
    assert served
    assert served == expected * (len(served) // len(expected))


def test_experts_answer_as_stock_while_slabs_leave(runs: Runs) -> None:
    assert_greedy(runs.over_cuts(runs.moe, len(SHORT)), runs.stock(runs.moe, SHORT, SHORT_TOKENS))


def test_latent_attention_answers_as_stock_while_slabs_leave(runs: Runs) -> None:
    """One prompt at a time: on a CPU, answers of stock vLLM's latent attention change with the batch."""
    # A slab holds 32 tokens and wastes much, so the pool has no room for the other models' longest request.
    moves = runs.over_cuts(runs.mla, 1, max_model_len=512)
    assert_greedy(moves, runs.stock(runs.mla, SHORT, SHORT_TOKENS, 1))


def test_kv_events_say_exactly_what_is_cached(windows: EventChecks) -> None:
    """The comparison itself is made at each of these moments (engine_runs.py)."""
    cached = windows.cached
    # The pinned slab's blocks have no lease. How much a burst leaves is the machine's to say.
    assert cached["leases ended"] < cached["whole"] and cached["cut"] < cached["again"]
    assert cached["reset"] == 0
    assert windows.num_removed > 0
    assert windows.num_cleared == 1


def test_prefix_cache_metrics_count_what_was_found(windows: EventChecks) -> None:
    length = len(WINDOWED[0])
    whole = length // BLOCK_TOKENS * BLOCK_TOKENS
    assert list(windows.hits["again"]) == [length, whole, whole]
    # What left with its slabs is computed again.
    assert windows.hits["after the cut"][2] < whole
    for looked_up, found, told in windows.hits.values():
        assert (looked_up, found) == (length, told)


def test_a_paused_session_keeps_its_blocks_until_a_cut_ends_it(runs: Runs) -> None:
    facts = runs.paused_session()
    assert facts == {"is_kept_without_stall": True, "is_ended_by_cut": True, "answers_after": 4}
