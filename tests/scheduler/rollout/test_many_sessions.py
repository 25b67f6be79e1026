"""Ten thousand trajectories whose prompts begin alike, more than the router remembers."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens

NUM_SESSIONS = 10_000
MAX_SESSIONS = 512
PREFIX = list(range(64))
NUM_TOKENS = 2
NUM_CLIENTS = 64


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.slow
async def test_many_sessions_with_one_prefix_get_their_own_tokens_and_are_bounded(
    start_router: StartRouter, is_named: bool
) -> None:
    async with (
        ScriptedWorker() as first,
        ScriptedWorker() as second,
        start_router(first, second, max_sessions=MAX_SESSIONS, max_fingerprints=MAX_SESSIONS) as client,
    ):
        sessions = iter(range(NUM_SESSIONS))

        async def play(numbers: Iterator[int]) -> None:
            """Two turns of each session; the second one's prompt goes on from the first one's answer."""
            for number in numbers:
                prompt = [*PREFIX, number]
                for _ in range(2):
                    body = {"prompt": prompt, "max_tokens": NUM_TOKENS}
                    name = {"X_Session_ID": f"s{number}"} if is_named else {}
                    choice = (await client.complete(body, **name))["choices"][0]
                    assert choice["token_ids"] == expected_tokens(prompt, NUM_TOKENS)
                    prompt = [*prompt, *choice["token_ids"]]

        await asyncio.gather(*(play(sessions) for _ in range(NUM_CLIENTS)))
        plane = client.router.plane
        assert len(plane.trajectories.sessions) <= MAX_SESSIONS
        assert plane.records.counters.turns == {"finished": 2 * NUM_SESSIONS}
        [job] = [account for account in plane.jobs if account.num_turns]
        assert job.num_tokens == 2 * NUM_SESSIONS * NUM_TOKENS
        assert job.next_turns == {"extended": NUM_SESSIONS, "diverged": 0}
        assert plane.dispatcher.num_queued == 0
        assert [worker.in_flight for worker in plane.registry.workers()] == [0, 0]
