"""The jobs of a router on the page of `rose top`."""

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from rose.node.pages.jobs import JobReading, JobsSample, jobs_page
from rose.node.top import main
from tests.scheduler.rollout.conftest import StartRouter, start_router
from tests.scheduler.rollout.scripted_worker import ScriptedWorker

__all__ = ["start_router"]
ROUTER = "http://router:8100"


def job(
    weight: float, tokens: int, *, priority: int = 0, queued: int = 1, paused: bool = False
) -> JobReading:
    return JobReading(
        weight=weight, priority=priority, paused=paused, in_flight=0, queued=queued, tokens=tokens
    )


def cells(now: JobsSample, before: JobsSample | None = None) -> dict[str, list[str]]:
    """The rows of the page by their first cell."""
    terminal = io.StringIO()
    page = jobs_page([now], {before.router: before} if before is not None else {})
    Console(width=100, file=terminal).print(page)
    rows = [line.split() for line in terminal.getvalue().splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def test_a_job_shows_what_it_is_entitled_to_and_what_it_gets() -> None:
    before = JobsSample(router=ROUTER, taken_at_s=10.0, jobs={"a": job(3, 100), "b": job(1, 100)})
    jobs = {"a": job(3, 700), "b": job(1, 300), "idle": job(4, 0, queued=0, paused=True)}
    found = cells(JobsSample(router=ROUTER, taken_at_s=12.0, jobs=jobs), before)
    assert found["a"] == ["0", "3", "75%", "75%", "300", "0", "1"]
    assert found["b"] == ["0", "1", "25%", "25%", "100", "0", "1"]
    assert found["idle"] == ["0", "4", "-", "0%", "0", "0", "0", "paused"]


def test_jobs_of_lower_priority_are_entitled_to_nothing_while_others_want_more() -> None:
    jobs = {"a": job(1, 0, priority=2), "b": job(3, 0, priority=2), "c": job(9, 0)}
    idle = {"d": job(9, 0, priority=5, queued=0), "e": job(9, 0, priority=6, paused=True)}
    found = cells(JobsSample(router=ROUTER, taken_at_s=12.0, jobs={**jobs, **idle}))
    shown = {name: found[name][:3] for name in "abcde"}
    assert shown == {
        "a": ["2", "1", "25%"],
        "b": ["2", "3", "75%"],
        "c": ["0", "9", "0%"],
        "d": ["5", "9", "-"],
        "e": ["6", "9", "-"],
    }


def test_a_router_that_was_restarted_has_no_negative_rate() -> None:
    before = JobsSample(router=ROUTER, taken_at_s=10.0, jobs={"a": job(1, 1000)})
    found = cells(JobsSample(router=ROUTER, taken_at_s=11.0, jobs={"a": job(1, 5)}), before)
    assert found["a"] == ["0", "1", "100%", "-", "0", "0", "1"]


async def test_the_command_asks_a_router_with_the_admin_key(
    start_router: StartRouter,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path))
    jobs = {"math": {"weight": 3.0, "key": "m"}}
    async with ScriptedWorker() as worker, start_router(worker, jobs=jobs, admin_key="adm") as client:
        argv = ["--once", "--router", client.router.url]
        assert await asyncio.to_thread(main, argv) == 1
        assert "401; set ROSE_ROUTER_ADMIN_KEY" in capsys.readouterr().out
        monkeypatch.setenv("ROSE_ROUTER_ADMIN_KEY", "adm")
        assert await asyncio.to_thread(main, argv) == 0
        shown = capsys.readouterr().out
        assert "math" in shown
        assert "weight" in shown


async def test_an_admins_new_weight_shows_in_the_metrics(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        await client.complete({"prompt": [1], "max_tokens": 2}, X_Rose_Job="a")

        async def metrics() -> str:
            async with client.http.get(f"{client.router.url}/metrics") as response:
                return await response.text()

        assert 'rose_router_job_weight{job="a"} 1.0' in await metrics()
        url = f"{client.router.url}/admin/jobs/a"
        async with client.http.put(url, json={"weight": 2.5}) as response:
            assert response.status == 200
        assert 'rose_router_job_weight{job="a"} 2.5' in await metrics()
