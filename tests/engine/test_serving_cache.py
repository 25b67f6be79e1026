"""Serving's prefix cache is serving's until a rollout engine wants the memory."""

from pathlib import Path
from typing import Any

import cache_runs
import engine_runs
from forked_engines import Reply, forks_in_pool
from preloaded import FORKS
from probes import prompt
from pytest import mark
from references import ModelDirs
from tiny_models import BLOCK_TOKENS

pytestmark = [mark.vllm, mark.slow]

POOL = "cache"
NUM_SLABS, FLOOR_SLABS = 24, 10
# One block of the serving model fills a slab: the chats take 8 slabs, and the others more than are left. The
# floor has room for the chats, the slab of the padding block, and one more.
CHATS = [prompt(f"chat-{index}", 2 * BLOCK_TOKENS + 20) for index in range(4)]
OTHERS = [prompt(f"other-{index}", 4 * BLOCK_TOKENS + 20) for index in range(5)]
ROLLOUTS = [prompt(f"wants-{index}", 3 * BLOCK_TOKENS) for index in range(8)]
ROLLOUT_TOKENS = 40


def test_serving_keeps_its_cache_until_rollouts_want_the_memory_and_then_gives_by_value(
    engines_dir: Path, models: ModelDirs
) -> None:
    events = {"is_full": FORKS.Event(), "stop": FORKS.Event()}
    wanted: dict[str, Any] = {
        "model": models.untied[0],
        "prompts": ROLLOUTS,
        "max_tokens": ROLLOUT_TOKENS,
    }
    with forks_in_pool(engines_dir / "serving-cache", POOL, num_slabs=NUM_SLABS, headroom_slabs=4) as fork:
        serving = fork(
            cache_runs.serve_from_cache,
            model=models.serving,
            pool=POOL,
            chats=CHATS,
            others=OTHERS,
            floor_slabs=FLOOR_SLABS,
            **events,
        )
        rollout = fork(cache_runs.roll_out_where_serving_caches, pool=POOL, **wanted, **events)
        stock_serving = fork(engine_runs.stock_answers, model=models.serving, prompts=CHATS, max_tokens=4)
        stock_rollout = fork(engine_runs.stock_answers, **wanted)
        facts = serving.result()
        replies: list[Reply] = rollout.result()
        assert {(reply.finish_reason, reply.stop_reason) for reply in replies} == {("length", None)}
        assert facts["answers"] == stock_serving.result()
        assert [reply.tokens for reply in replies] == stock_rollout.result()

    whole = [2 * BLOCK_TOKENS] * len(CHATS)
    assert facts["first"] == [0] * len(CHATS)
    assert facts["round robin"] == facts["after 2 s"] == whole
    # Without a rollout engine, serving takes the whole pool, and its own requests evict the oldest cache.
    assert facts["alone"] == NUM_SLABS
    # The rollouts got what they wanted, and what was asked for often outlived what was asked for last.
    assert FLOOR_SLABS <= facts["beside rollouts"] < NUM_SLABS - FLOOR_SLABS
    # They are asked one after the other, and each new block evicts the end of the chat that is asked next.
    assert facts["often asked"][0] == 2 * BLOCK_TOKENS
    assert min(facts["often asked"]) >= BLOCK_TOKENS
    assert sum(facts["last asked"]) <= BLOCK_TOKENS
