"""vLLM's MooncakeConnector between a prefiller and a decoder that share slabs with live rollouts."""

from pathlib import Path
from typing import Any

import engine_runs
import mooncake_runs
import pytest
from live_rollouts import live_rollouts
from preloaded import FORKS
from probes import SERVING_TOKENS, prompt
from references import ModelDirs, StockAnswers
from tiny_models import BLOCK_TOKENS

from rose.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.slow]

POOL = "mooncake-pair"
SIZE = {"num_slabs": 32, "headroom_slabs": 6}
PROMPTS = [prompt(f"mooncake-pair-{index}", 200 + 40 * index) for index in range(8)]


def test_a_decoder_goes_on_from_blocks_that_mooncake_wrote_into_its_slabs(
    engines_dir: Path, models: ModelDirs, stock: StockAnswers
) -> None:
    asked, ready = FORKS.Queue(), FORKS.Event()
    pair: dict[str, Any] = {"model": models.serving, "pool": POOL, "asked": asked, "ready": ready}
    pair["port"] = free_port()
    given: dict[str, Any] = {"prompts": PROMPTS, "max_tokens": SERVING_TOKENS}
    with live_rollouts(engines_dir / POOL, POOL, models, stock, **SIZE) as rollouts:
        reference = rollouts.fork(engine_runs.stock_answers, model=models.serving, **given)
        prefiller = rollouts.fork(mooncake_runs.prefill, **pair, stop=rollouts.stop)
        decoded = rollouts.fork(mooncake_runs.decode, **pair, **given).result()
        num_moves, expected = rollouts.end(), reference.result()
        assert prefiller.result() > 0
    assert [reply.tokens for reply in decoded] == expected
    cached = [len(one) // BLOCK_TOKENS * BLOCK_TOKENS for one in PROMPTS]
    assert all(reply.num_cached_tokens >= least for reply, least in zip(decoded, cached, strict=True))
    assert num_moves > SIZE["num_slabs"]
