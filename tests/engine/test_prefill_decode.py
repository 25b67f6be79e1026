"""vLLM's own NixlConnector between a prefiller and a decoder that share slabs with live rollouts."""

from pathlib import Path
from typing import Any

import prefill_decode_runs
import pytest
from forked_engines import Reply
from live_rollouts import live_rollouts
from prefill_decode_runs import Line
from preloaded import FORKS
from probes import SERVING_TOKENS, wave_prompts
from references import ModelDirs, StockAnswers

from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

POOL = "prefill-decode"
SIZE = {"num_slabs": 32, "headroom_slabs": 6}
PROMPTS = [*wave_prompts(Role.SERVING, 0), *wave_prompts(Role.SERVING, 1)]
PEERS_PROMPTS = wave_prompts(Role.SERVING, 2)
"""Those that a stock engine prefills for ROSE's decoder."""


def test_a_card_that_keeps_physical_pages_meets_the_right_bytes_in_the_window_alone(
    engines_dir: Path, models: ModelDirs, stock: StockAnswers
) -> None:
    """Between ROSE's prefiller and ROSE's decoder, and between either and a stock engine."""
    line, peers = (Line(asked=FORKS.Queue(), told=FORKS.Queue()) for _ in range(2))
    decodes = FORKS.Event()
    given: dict[str, Any] = {"model": models.serving, "max_tokens": SERVING_TOKENS}
    with live_rollouts(engines_dir / POOL, POOL, models, stock, **SIZE) as rollouts:

        def decode(work: prefill_decode_runs.Work, *, has_window: bool) -> list[Reply]:
            decoder = rollouts.fork(
                prefill_decode_runs.decode, **given, pool=POOL, work=work, has_window=has_window
            )
            replies: list[Reply] = decoder.result()
            decoder.stop()
            return replies

        prefiller = rollouts.fork(
            prefill_decode_runs.prefill, model=models.serving, pool=POOL, line=line, stop=rollouts.stop
        )
        peer = rollouts.fork(
            prefill_decode_runs.prefill_and_decode_in_stock,
            **given,
            line=peers,
            decodes=decodes,
            work=[(line, PROMPTS)],
        )
        decoded = decode([(line, PROMPTS), (peers, PEERS_PROMPTS)], has_window=True)
        naive = decode([(line, PROMPTS)], has_window=False)
        decodes.set()
        decoded_in_stock: list[Reply] = peer.result()
        num_moves = rollouts.end()
        assert prefiller.result() > 0
    answers = stock.of("serving")
    expected = [answers[tuple(one)]["tokens"] for one in (*PROMPTS, *PEERS_PROMPTS)]
    assert [reply.tokens for reply in decoded] == expected
    assert [reply.tokens for reply in decoded_in_stock] == expected[: len(PROMPTS)]
    assert [reply.tokens for reply in naive] != expected[: len(PROMPTS)]
    assert num_moves > 2 * SIZE["num_slabs"]
