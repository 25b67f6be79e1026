"""vLLM's MooncakeConnector between a prefiller and a decoder that share slabs with live rollouts."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import engine_runs
import mooncake_runs
import prefill_decode_runs
import pytest
from forked_engines import Fork
from preloaded import FORKS
from probes import ROLLOUT_TOKENS, SERVING_TOKENS, prompt, wave_prompts
from real_engine import runtime_dir
from references import ModelDirs, StockAnswers
from tiny_models import BLOCK_TOKENS, SLAB_BYTES

from rose.memory.daemon.daemon import start_daemon
from rose.ports import free_port
from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.slow]

POOL = "mooncake-pair"
NUM_SLABS, HEADROOM_SLABS = 32, 6
PROMPTS = [prompt(f"mooncake-pair-{index}", 200 + 40 * index) for index in range(8)]


def test_a_decoder_goes_on_from_blocks_that_mooncake_wrote_into_its_slabs(
    engines_dir: Path, models: ModelDirs, stock: StockAnswers
) -> None:
    folder = engines_dir / POOL
    folder.mkdir()
    rollouts = wave_prompts(Role.ROLLOUT, 0)
    asked, stop, ready = FORKS.Queue(), FORKS.Event(), FORKS.Event()
    pair: dict[str, Any] = {"pool": POOL, "asked": asked, "ready": ready, "port": free_port()}
    given: dict[str, Any] = {"prompts": PROMPTS, "max_tokens": SERVING_TOKENS}
    with ExitStack() as undo:

        def fork(function: Any, model: Path, **arguments: Any) -> Fork:
            one = Fork(folder, function, model=model, **arguments)
            undo.callback(one.stop)
            return one

        daemon = start_daemon(
            POOL,
            num_slabs=NUM_SLABS,
            slab_bytes=SLAB_BYTES,
            headroom_slabs=HEADROOM_SLABS,
            runtime_dir=runtime_dir(folder),
        )
        undo.callback(daemon.stop)
        reference = fork(engine_runs.stock_answers, models.serving, **given)
        rollout = fork(
            prefill_decode_runs.roll_out,
            models.untied[0],
            pool=POOL,
            prompts=rollouts,
            max_tokens=ROLLOUT_TOKENS,
            stop=stop,
        )
        prefiller = fork(mooncake_runs.prefill, models.serving, **pair, stop=stop)
        decoded = fork(mooncake_runs.decode, models.serving, **pair, **given).result()
        stop.set()
        moves, expected = rollout.result(), reference.result()
        assert prefiller.result() > 0
    assert [reply.tokens for reply in decoded] == expected
    cached = [len(one) // BLOCK_TOKENS * BLOCK_TOKENS for one in PROMPTS]
    assert all(reply.num_cached_tokens >= least for reply, least in zip(decoded, cached, strict=True))
    assert moves.num_moves > NUM_SLABS
    answers = stock.of("rollout")
    for replies in moves.replies:
        for one, reply in zip(rollouts, replies, strict=True):
            assert reply.tokens == answers[tuple(one)]["tokens"][: len(reply.tokens)]
