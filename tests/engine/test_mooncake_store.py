"""vLLM's MooncakeStoreConnector with a real store: a serving engine beside rollouts that take its slabs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import connector_runs
import engine_runs
import pytest
from live_rollouts import live_rollouts
from preloaded import FORKS
from probes import prompt
from real_engine import new_folder, until
from references import ModelDirs, StockAnswers
from tiny_models import BLOCK_TOKENS

from rose.transfer.relay.mooncake import start_mooncake_master

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.slow]

ROUNDS = [[prompt(f"kept-{part}-{index}", 300) for index in range(3)] for part in range(3)]
TOKENS = 24
SIZE = {"num_slabs": 12, "headroom_slabs": 3, "slab_bytes": 1056 << 10}
"""Fewer slabs than rollouts want, so that they take every one that serving lends. Blocks of neither model
divide such a slab, so ids have gaps, and the range does not end with a block."""


@pytest.fixture
def store(engines_dir: Path) -> Iterator[Path]:
    """Returns the file that tells engines where the store is."""
    folder = new_folder(engines_dir, "store")
    master = start_mooncake_master("127.0.0.1")
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"{master.host}:{master.port}",
        "protocol": "tcp",
        "global_segment_size": "64MB",
        "local_buffer_size": "64MB",
    }
    (folder / "mooncake.json").write_text(json.dumps(config))
    yield folder / "mooncake.json"
    master.stop()


def test_blocks_come_back_right_from_a_store_whose_engine_lends_its_slabs_to_rollouts(
    engines_dir: Path, models: ModelDirs, stock: StockAnswers, store: Path
) -> None:
    """A stock engine reads the same store, and rollouts answer as stock vLLM all along."""
    prompts = [one for part in ROUNDS for one in part]
    asked: dict[str, Any] = {"model": models.serving, "prompts": prompts, "max_tokens": TOKENS}
    stored = FORKS.Event()
    with live_rollouts(store.parent, "kept", models, stock, **SIZE) as rollouts:
        reference = rollouts.fork(engine_runs.stock_answers, **asked)
        serving = rollouts.fork(
            connector_runs.answer_again_from_a_store,
            model=models.serving,
            pool="kept",
            rounds=ROUNDS,
            max_tokens=TOKENS,
            store=store,
            stored=stored,
            stop=rollouts.stop,
        )
        until(lambda: stored.is_set() or serving.has_ended, "all blocks are stored")
        assert stored.is_set(), serving.result()
        shared = rollouts.fork(connector_runs.answer_from_a_store, store=store, **asked).result()
        num_moves = rollouts.end()
        kept = [reply for part in serving.result() for reply in part]
        expected = reference.result()
    for replies in (kept, shared):
        assert [reply.tokens for reply in replies] == expected
        assert [reply.num_cached_tokens for reply in replies] == [2 * BLOCK_TOKENS] * len(replies)
    assert num_moves > 2 * SIZE["num_slabs"]
