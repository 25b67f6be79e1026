"""RouterTurns: token ids through a router and back."""

import pytest

from rose.errors import WorkerError
from rose.trainers.turns import RouterTurns
from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens


async def test_a_turn_keeps_its_ids_logprobs_and_version_over_a_lost_worker(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker(version="run/7") as worker:
        worker.faults.append(Fault(kind="disconnect", after_tokens=2))
        async with start_router(worker) as client:
            turns = RouterTurns(client.router.url, "scripted")
            turn = await turns.complete("trajectory-1", [1, 2, 3], {"max_tokens": 5, "temperature": 1.0})
            await turns.close()
            assert len(client.router.plane.trajectories.sessions) == 1
    tokens = expected_tokens([1, 2, 3], 5)
    assert turn.token_ids == tokens
    assert turn.logprobs == [-token / 1000 for token in tokens]
    assert set(turn.versions) == {7}
    assert turn.finish_reason == "length"


async def test_what_the_router_refuses_is_a_worker_error_with_its_reason(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        turns = RouterTurns(client.router.url, "another model")
        with pytest.raises(WorkerError, match=r"HTTP 404.*another model"):
            await turns.complete("trajectory-1", [1], {})
        await turns.close()
    gone = RouterTurns(client.router.url, "scripted")
    with pytest.raises(WorkerError, match="trajectory-1 failed"):
        await gone.complete("trajectory-1", [1], {})
    await gone.close()


async def test_the_job_and_its_run_are_named(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker(version="other/1") as worker,
        ScriptedWorker(version="mine/4") as own,
        start_router(worker, own) as client,
    ):
        turns = RouterTurns(client.router.url, "scripted", job="math", run="mine")
        for name in ("a", "b"):
            turn = await turns.complete(name, [1, 2], {"max_tokens": 3})
            assert set(turn.versions) == {4}
        await turns.close()
        assert "math" in [job.name for job in client.router.plane.jobs]
