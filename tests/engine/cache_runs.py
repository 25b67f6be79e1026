"""What the forked engines do in the tests of serving's prefix cache. Each function runs in a process of its
own."""

import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from engine_runs import LEASE_S, STALL_S, WINDOW_S, Prompts, tenant_of
from forked_engines import Driver, Reply, make_engine


def serve_from_cache(
    model: Path,
    pool: str,
    chats: Prompts,
    others: Prompts,
    floor_slabs: int,
    is_full: Event,
    stop: Event,
) -> dict[str, Any]:
    """A serving engine that is alone in its pool at first. ``chats`` and ``others`` fill the pool; then
    rollouts come, and leave when they are done. The chats are asked often, each of the others once, the last
    of them after the chats.

    Returns the tokens that were found in the cache at each moment, and slabs held."""
    settings = {"role": "serving", "pool": pool, "serving_window_s": WINDOW_S, "floor_slabs": floor_slabs}
    driver = Driver(make_engine(model, settings))
    tenant, facts, answers = tenant_of(driver), dict[str, Any](), list[list[int]]()

    def cached_tokens(prompts: Prompts) -> list[int]:
        replies = [driver.answer([prompt], 4)[0] for prompt in prompts]
        answers.extend(reply.tokens for reply in replies if len(answers) < len(chats))
        return [reply.num_cached_tokens for reply in replies]

    def wait(seconds: float) -> None:
        until_s = time.monotonic() + seconds
        driver.step_until(lambda: time.monotonic() > until_s, "a pause")

    facts["first"] = cached_tokens(chats)
    facts["round robin"] = cached_tokens(chats)
    wait(2.0)
    facts["after 2 s"] = cached_tokens(chats)
    cached_tokens(others[:-1])
    for _ in range(3):
        cached_tokens(chats)
    cached_tokens(others[-1:])
    facts["alone"] = tenant.num_owned
    tenant.pool.check_integrity()
    tenant.cache.check_integrity()
    is_full.set()
    driver.step_until(stop.is_set, "rollouts have gone", at_most_s=1200.0)
    facts["beside rollouts"] = tenant.num_owned
    facts["often asked"], facts["last asked"] = cached_tokens(chats), cached_tokens(others[-1:])
    tenant.pool.check_integrity()
    tenant.cache.check_integrity()
    return {**facts, "answers": answers}


def roll_out_where_serving_caches(
    model: Path, pool: str, prompts: Prompts, max_tokens: int, is_full: Event, stop: Event
) -> list[Reply]:
    """A rollout engine that comes into a pool full of serving's prefix cache, and wants most of it."""
    assert is_full.wait(1200.0)
    try:
        settings = {"role": "rollout", "pool": pool, "lease_s": LEASE_S, "stall_s": STALL_S}
        driver = Driver(make_engine(model, settings))
        return driver.answer(prompts, max_tokens)
    finally:
        stop.set()
