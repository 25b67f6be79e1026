"""vLLM's MooncakeConnector between a prefiller and a decoder that share slabs with live rollouts."""

from pathlib import Path
from typing import Any

import mooncake_runs
import pytest
from live_rollouts import live_rollouts
from preloaded import FORKS
from probes import SERVING_TOKENS, wave_prompts
from references import ModelDirs, StockAnswers
from tiny_models import BLOCK_TOKENS

from rose.ports import free_port
from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.slow]

POOL = "mooncake-pair"
SIZE = {"num_slabs": 32, "headroom_slabs": 6}
PROMPTS = [*wave_prompts(Role.SERVING, 0), *wave_prompts(Role.SERVING, 1)]


def test_a_decoder_goes_on_from_blocks_that_mooncake_wrote_into_its_slabs(
    engines_dir: Path, models: ModelDirs, stock: StockAnswers
) -> None:
    """A stock decoder goes on from the same prefiller's blocks."""
    asked, ready = FORKS.Queue(), FORKS.Event()
    pair: dict[str, Any] = {"model": models.serving, "asked": asked, "ready": ready, "port": free_port()}
    given: dict[str, Any] = {"prompts": PROMPTS, "max_tokens": SERVING_TOKENS}
    with live_rollouts(engines_dir / POOL, POOL, models, stock, **SIZE) as rollouts:
        prefiller = rollouts.fork(mooncake_runs.prefill, **pair, pool=POOL, stop=rollouts.stop)
        decoders = [rollouts.fork(mooncake_runs.decode, **pair, **given, pool=pool) for pool in (POOL, None)]
        decoded = [decoder.result() for decoder in decoders]
        num_moves = rollouts.end()
        assert prefiller.result() > 0
    expected = [stock.of("serving")[tuple(one)]["tokens"] for one in PROMPTS]
    cached = [len(one) // BLOCK_TOKENS * BLOCK_TOKENS for one in PROMPTS]
    for replies in decoded:
        assert [reply.tokens for reply in replies] == expected
        assert all(reply.num_cached_tokens >= least for reply, least in zip(replies, cached, strict=True))
    assert num_moves > SIZE["num_slabs"]
