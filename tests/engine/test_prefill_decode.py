"""vLLM's own NixlConnector between a prefiller and a decoder that share slabs with live rollouts."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import engine_runs
import prefill_decode_runs
import pytest
from forked_engines import Fork, Reply
from preloaded import FORKS
from probes import ROLLOUT_TOKENS, SERVING_TOKENS, prompt, wave_prompts
from real_engine import runtime_dir
from references import ModelDirs, StockAnswers
from tiny_models import SLAB_BYTES

from rose.memory.daemon.daemon import start_daemon
from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

POOL = "prefill-decode"
NUM_SLABS, HEADROOM_SLABS = 32, 6
PROMPTS = [prompt(f"prefill-decode-{index}", 200 + 40 * index) for index in range(8)]


def test_a_card_that_keeps_physical_pages_meets_the_right_bytes_in_the_window_alone(
    engines_dir: Path, models: ModelDirs, stock: StockAnswers
) -> None:
    folder = engines_dir / "prefill-decode"
    folder.mkdir()
    rollouts = wave_prompts(Role.ROLLOUT, 0)
    asked, told, stop = FORKS.Queue(), FORKS.Queue(), FORKS.Event()
    with ExitStack() as undo:

        def fork(function: Any, model: Path, **arguments: Any) -> Fork:
            one = Fork(folder, function, model=model, **arguments)
            undo.callback(one.stop)
            return one

        def decode(*, has_window: bool) -> list[Reply]:
            given = {"pool": POOL, "prompts": PROMPTS, "max_tokens": SERVING_TOKENS}
            queues = {"asked": asked, "told": told}
            pair = fork(prefill_decode_runs.decode, models.serving, **given, **queues, has_window=has_window)
            replies: list[Reply] = pair.result()
            pair.stop()
            return replies

        daemon = start_daemon(
            POOL,
            num_slabs=NUM_SLABS,
            slab_bytes=SLAB_BYTES,
            headroom_slabs=HEADROOM_SLABS,
            runtime_dir=runtime_dir(folder),
        )
        undo.callback(daemon.stop)
        reference = fork(
            engine_runs.stock_answers, models.serving, prompts=PROMPTS, max_tokens=SERVING_TOKENS
        )
        rollout = fork(
            prefill_decode_runs.roll_out,
            models.untied[0],
            pool=POOL,
            prompts=rollouts,
            max_tokens=ROLLOUT_TOKENS,
            stop=stop,
        )
        prefiller = fork(
            prefill_decode_runs.prefill, models.serving, pool=POOL, asked=asked, told=told, stop=stop
        )
        decoded, naive = decode(has_window=True), decode(has_window=False)
        stop.set()
        moves, expected = rollout.result(), reference.result()
        assert prefiller.result() > 0
    assert [reply.tokens for reply in decoded] == expected
    assert [reply.tokens for reply in naive] != expected
    assert moves.num_moves > 2 * NUM_SLABS
    answers = stock.of("rollout")
    for replies in moves.replies:
        for given, reply in zip(rollouts, replies, strict=True):
            tokens = answers[tuple(given)]["tokens"]
            assert reply.tokens == tokens[: len(reply.tokens)]
