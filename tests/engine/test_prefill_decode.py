"""vLLM's own NixlConnector between a prefiller and a decoder that share slabs with live rollouts."""

from pathlib import Path
from typing import Any

import engine_runs
import prefill_decode_runs
import pytest
from forked_engines import Reply
from live_rollouts import live_rollouts
from preloaded import FORKS
from probes import SERVING_TOKENS, prompt
from references import ModelDirs, StockAnswers

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

POOL = "prefill-decode"
SIZE = {"num_slabs": 32, "headroom_slabs": 6}
PROMPTS = [prompt(f"prefill-decode-{index}", 200 + 40 * index) for index in range(8)]


def test_a_card_that_keeps_physical_pages_meets_the_right_bytes_in_the_window_alone(
    engines_dir: Path, models: ModelDirs, stock: StockAnswers
) -> None:
    queues = {"asked": FORKS.Queue(), "told": FORKS.Queue()}
    pair: dict[str, Any] = {"model": models.serving, "pool": POOL, **queues}
    given: dict[str, Any] = {"prompts": PROMPTS, "max_tokens": SERVING_TOKENS}
    with live_rollouts(engines_dir / POOL, POOL, models, stock, **SIZE) as rollouts:

        def decode(*, has_window: bool) -> list[Reply]:
            decoder = rollouts.fork(prefill_decode_runs.decode, **pair, **given, has_window=has_window)
            replies: list[Reply] = decoder.result()
            decoder.stop()
            return replies

        reference = rollouts.fork(engine_runs.stock_answers, model=models.serving, **given)
        prefiller = rollouts.fork(prefill_decode_runs.prefill, **pair, stop=rollouts.stop)
        decoded, naive = decode(has_window=True), decode(has_window=False)
        num_moves, expected = rollouts.end(), reference.result()
        assert prefiller.result() > 0
    assert [reply.tokens for reply in decoded] == expected
    assert [reply.tokens for reply in naive] != expected
    assert num_moves > 2 * SIZE["num_slabs"]
