"""vLLM's MooncakeStoreConnector with a real store: a serving engine beside rollouts that take its slabs."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import connector_runs
import engine_runs
import prefill_decode_runs
import pytest
from forked_engines import Fork
from preloaded import FORKS
from probes import ROLLOUT_TOKENS, prompt, wave_prompts
from real_engine import runtime_dir, until
from references import ModelDirs, StockAnswers
from tiny_models import BLOCK_TOKENS

from rose.memory.daemon.daemon import start_daemon
from rose.transfer.relay.mooncake import start_mooncake_master
from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.slow]

ROUNDS = [[prompt(f"kept-{part}-{index}", 300) for index in range(3)] for part in range(3)]
TOKENS = 24
NUM_SLABS, HEADROOM_SLABS = 12, 3
"""Fewer than rollouts want, so that they take every slab that serving lends."""
SKEWED_SLAB_BYTES = 1056 << 10
"""Blocks of neither model divide such a slab, so ids have gaps, and the range does not end with a block."""


@pytest.fixture
def store(engines_dir: Path) -> Iterator[Path]:
    """Returns the file that tells engines where the store is."""
    folder = engines_dir / "mooncake-store"
    folder.mkdir()
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
    folder = store.parent
    asked: dict[str, Any] = {"prompts": [one for part in ROUNDS for one in part], "max_tokens": TOKENS}
    rollouts = wave_prompts(Role.ROLLOUT, 0)
    stored, stop = FORKS.Event(), FORKS.Event()
    with ExitStack() as undo:

        def fork(function: Any, model: Path, **arguments: Any) -> Fork:
            one = Fork(folder, function, model=model, **arguments)
            undo.callback(one.stop)
            return one

        daemon = start_daemon(
            "kept",
            num_slabs=NUM_SLABS,
            slab_bytes=SKEWED_SLAB_BYTES,
            headroom_slabs=HEADROOM_SLABS,
            runtime_dir=runtime_dir(folder),
        )
        undo.callback(daemon.stop)
        reference = fork(engine_runs.stock_answers, models.serving, **asked)
        rollout = fork(
            prefill_decode_runs.roll_out,
            models.untied[0],
            pool="kept",
            prompts=rollouts,
            max_tokens=ROLLOUT_TOKENS,
            stop=stop,
        )
        serving = fork(
            connector_runs.answer_again_from_a_store,
            models.serving,
            pool="kept",
            rounds=ROUNDS,
            max_tokens=TOKENS,
            store=store,
            stored=stored,
            stop=stop,
        )
        until(lambda: stored.is_set() or serving.has_ended, "all blocks are stored")
        assert stored.is_set(), serving.result()
        shared = fork(connector_runs.answer_from_a_store, models.serving, store=store, **asked).result()
        stop.set()
        kept = [reply for part in serving.result() for reply in part]
        moves, expected = rollout.result(), reference.result()
    for replies in (kept, shared):
        assert [reply.tokens for reply in replies] == expected
        assert [reply.num_cached_tokens for reply in replies] == [2 * BLOCK_TOKENS] * len(replies)
    assert moves.num_moves > 2 * NUM_SLABS
    answers = stock.of("rollout")
    for round_ in moves.replies:
        for given, reply in zip(rollouts, round_, strict=True):
            assert reply.tokens == answers[tuple(given)]["tokens"][: len(reply.tokens)]
