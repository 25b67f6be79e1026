"""Connectors that copy through the worker or into host memory, while slabs leave as soon as they may."""

from pathlib import Path

import connector_runs
import engine_runs
import pytest
from forked_engines import Reply, forks_in_pool
from probes import prompt
from real_engine import new_folder
from references import ModelDirs
from tiny_models import BLOCK_TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(f"disaggregated-{index}", 280 + 50 * index) for index in range(3)]
ROUNDS = [[prompt(f"offloaded-{part}-{index}", 300) for index in range(3)] for part in range(3)]
TOKENS = 24
NUM_SLABS, HEADROOM_SLABS = 24, 6
SIZE = {"num_slabs": NUM_SLABS, "headroom_slabs": HEADROOM_SLABS}


def test_a_decoder_goes_on_from_blocks_that_were_sent_long_after_their_prefill(
    engines_dir: Path, models: ModelDirs
) -> None:
    folder = new_folder(engines_dir, "disaggregated")
    store = folder / "store"
    store.mkdir()
    given = {"model": models.serving, "prompts": PROMPTS}
    with (
        forks_in_pool(folder, "decode", **SIZE) as fork,
        forks_in_pool(folder, "prefill", **SIZE),
    ):
        stock = fork(engine_runs.stock_answers, **given, max_tokens=TOKENS)
        slabs = fork(connector_runs.prefill_and_send_late, **given, pool="prefill", store=store).result()
        replies: list[Reply] = fork(
            connector_runs.decode_from_disk, **given, pool="decode", max_tokens=TOKENS, store=store
        ).result()
        expected = stock.result()
    # Idle slabs went back meanwhile; those with blocks that were still to be sent stayed.
    assert slabs["after traffic"] > slabs["unsent"] >= slabs["in use"] > slabs["sent"] == 1, slabs
    # Out of service it lends all but one slab, and has its headroom back with the first request.
    assert slabs["lent"] == NUM_SLABS - 1
    assert slabs["back"] <= NUM_SLABS - HEADROOM_SLABS
    for reply, tokens, asked in zip(replies, expected, PROMPTS, strict=True):
        assert reply.tokens == tokens
        assert reply.num_cached_tokens == (len(asked) - 2) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("kind", ["sync", "async", "stages"])
def test_offloaded_blocks_come_back_right_as_the_slabs_of_pending_copies_stay(
    engines_dir: Path, models: ModelDirs, kind: str
) -> None:
    """With async scheduling, without it, and in two stages of a pipeline."""
    given = {"model": models.serving, "max_tokens": TOKENS}
    pool, num_stages = f"offloading-{kind}", 2 if kind == "stages" else 1
    with forks_in_pool(engines_dir / pool, pool, **SIZE, num_shards=num_stages) as fork:
        prompts = [one for part in ROUNDS for one in part]
        stock = fork(engine_runs.stock_answers, **given, prompts=prompts)
        engine = fork(
            connector_runs.answer_again_from_the_host,
            **given,
            pool=pool,
            rounds=ROUNDS,
            is_async=kind == "async",
            num_stages=num_stages,
        )
        answers, expected = [reply for part in engine.result() for reply in part], stock.result()
    assert [reply.num_cached_tokens for reply in answers] == [2 * BLOCK_TOKENS] * len(answers)
    is_right = [reply.tokens == tokens for reply, tokens in zip(answers, expected, strict=True)]
    assert is_right == [True] * 6 + [False] * 3, "the last round shows what is lost without"
