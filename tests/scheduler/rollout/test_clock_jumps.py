"""Jumps of the wall clock end no lease, no key and no turn."""

import asyncio
import time

import pytest

from rose.engine.http.leases import Leases
from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until

PROMPT = [1, 2, 3]
BODY = {"prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
KEY = {"Authorization": "Bearer math-key"}
DAYS_400_S = 400 * 86400.0


@pytest.mark.parametrize("jump_s", [DAYS_400_S, -DAYS_400_S])
async def test_leases_and_keys_outlast_a_jump_of_the_wall_clock(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    settings = {"jobs": {"math": {"key": "math-key"}}, "deadline_s": 3600}
    async with (
        ScriptedWorker(leases=Leases(), hold_after=2) as worker,
        start_router(worker, **settings) as client,
    ):
        known = client.known(worker)
        await until(lambda: known.lease is not None and known.lease.turns == known.cap)
        running = asyncio.create_task(client.post("/v1/completions", BODY, **KEY))
        await until(lambda: worker.num_held == 1)
        wall_s = time.time
        monkeypatch.setattr(time, "time", lambda: wall_s() + jump_s)
        seen = known.last_seen
        await until(lambda: known.last_seen != seen)  # a heartbeat renews the lease under the new time
        assert known.lease is not None
        assert known.lease.turns == known.cap
        worker.let_pass()
        for status, answer in (await running, await client.post("/v1/completions", BODY, **KEY)):
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == expected_tokens(PROMPT, 4)
        assert client.counters()["reroutes"] == {}
        status, _ = await client.post("/v1/completions", BODY, Authorization="Bearer other")
        assert status == 401
