"""What an admin's changes do where they can't be kept, and what is kept of them."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rose.scheduler.rollout.http.shared import entries
from tests.scheduler.rollout.conftest import Client, StartRouter
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until


async def test_a_step_that_can_not_be_kept_is_told_to_the_engines(
    start_router: StartRouter, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    async with ScriptedWorker() as worker, start_router(worker, state=folder / "router.json") as client:
        (folder / "router.json").unlink()
        folder.rmdir()
        status, answer = await client.post("/admin/rl_step", {"step": 3})
        assert (status, "done, but not kept" in answer["error"]["message"]) == (500, True)
        assert worker.steps == [3]


async def test_of_a_job_only_what_an_admin_has_set_is_kept(start_router: StartRouter, tmp_path: Path) -> None:
    state, admin = tmp_path / "router.json", {"Authorization": "Bearer adm"}

    def settings(key: str) -> dict[str, Any]:
        return {"state": state, "admin_key": "adm", "jobs": {"math": {"key": key, "weight": 2}}}

    async with ScriptedWorker() as worker:
        async with start_router(worker, **settings("old")) as client:
            for change in ({"weight": 3}, {"max_in_flight": 4}):
                url = f"{client.router.url}/admin/jobs/math"
                async with client.http.put(url, json=change, headers=admin) as response:
                    assert response.status == 200
            assert client.router.plane.jobs.holder("old") == "math"
        kept = json.loads(state.read_text())["entries"]["job math"]["value"]
        assert kept == {"weight": 3, "max_in_flight": 4}
        async with start_router(worker, **settings("new")) as client:
            assert client.router.plane.jobs.holder("new") == "math"
            assert client.router.plane.jobs.spec("math").weight == 3


async def test_what_an_admin_set_against_the_settings_is_logged_at_the_next_start(
    start_router: StartRouter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "router.json"
    async with ScriptedWorker() as gone, ScriptedWorker() as kept:
        async with start_router(gone, kept, state=state) as client:
            async with client.http.delete(f"{client.router.url}/workers/{gone.id}") as response:
                assert response.status == 200
            assert (await client.post("/admin/pause", {"job": "math"}))[0] == 200
        caplog.clear()
        async with start_router(gone, kept, state=state):
            lines = [each.getMessage() for each in caplog.records if "an admin has set" in each.message]
        assert [f"worker {gone.id} is removed" in lines[0], "paused math is True" in lines[1]] == [True, True]
        assert len(lines) == 2 and all(str(state) in line for line in lines)


async def test_a_job_per_run_leaves_a_bounded_file_and_peers_agree(
    start_router: StartRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_MOST_REMOVED", 3)
    state = tmp_path / "router.json"
    async with ScriptedWorker() as worker, start_router(worker, state=state) as client:
        await client.post("/admin/pause", {"job": "math"})
        async with start_router(worker, peers=(client.router.url,)) as peer:
            own, theirs = (each.router._service.changes.entries for each in (client, peer))
            for number in range(8):
                url = f"{client.router.url}/admin/jobs/run-{number}"
                async with client.http.put(url, json={"weight": 2}) as response:
                    assert response.status == 200
                async with client.http.delete(url) as response:
                    assert response.status == 200
                await until(lambda: own.digest == theirs.digest)
            assert kept_of(state) == {"paused math": True, **{f"job run-{n}": None for n in (5, 6, 7)}}


async def test_the_removal_of_a_worker_of_the_settings_is_never_forgotten_and_peers_without_it_agree(
    start_router: StartRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_MOST_REMOVED", 3)
    state = tmp_path / "router.json"
    async with ScriptedWorker() as gone, ScriptedWorker() as kept, ScriptedWorker() as added:
        async with (
            start_router(gone, kept, state=state) as client,
            start_router(kept, peers=(client.router.url,)) as peer,
        ):
            own, theirs = (each.router._service.changes.entries for each in (client, peer))
            port = added.id.partition(":")[2]
            others = [f"{host}:{port}" for host in ("127.0.0.1", "localhost", "127.0.0.2", "127.0.0.3")]
            for name in (gone.id, *others):
                if name in others:
                    assert (await client.post("/workers", {"url": f"http://{name}"}))[0] == 201
                async with client.http.delete(f"{client.router.url}/workers/{name}") as response:
                    assert response.status == 200
                await until(lambda: own.digest == theirs.digest)
            assert kept_of(state) == {f"worker {name}": None for name in (gone.id, *others[1:])}
            assert sorted(theirs.all()) == sorted(f"worker {name}" for name in others[1:])
        async with start_router(gone, kept, state=state) as client:
            assert [worker.id for worker in client.router.plane.registry.workers()] == [kept.id]


class SlowDisk:
    """What every fsync of this process waits for."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.num_begun = self.num_now = self.most_at_once = 0
        self._lock = threading.Lock()

    def fsync(self, _: int) -> None:
        with self._lock:
            self.num_begun, self.num_now = self.num_begun + 1, self.num_now + 1
            self.most_at_once = max(self.most_at_once, self.num_now)
        self.may_go_on.wait(60)
        with self._lock:
            self.num_now -= 1


@asynccontextmanager
async def on_a_slow_disk(
    start_router: StartRouter, worker: ScriptedWorker, state: Path
) -> AsyncIterator[tuple[Client, SlowDisk]]:
    """A router whose file is there already, and a disk that hangs from now on until it may go on."""
    disk = SlowDisk()
    async with start_router(worker, state=state) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", disk.fsync)
            try:
                yield client, disk
            finally:
                disk.may_go_on.set()
                await client.router._service.changes.entries.close()


def kept_of(state: Path) -> dict[str, Any]:
    return {key: entry["value"] for key, entry in json.loads(state.read_text())["entries"].items()}


async def test_turns_go_on_while_the_disk_hangs_and_the_admin_waits_for_it(
    start_router: StartRouter, tmp_path: Path
) -> None:
    state, body = tmp_path / "router.json", {"model": "scripted", "prompt": [1, 2], "max_tokens": 5}
    async with (
        ScriptedWorker() as worker,
        on_a_slow_disk(start_router, worker, state) as (client, disk),
    ):
        change = asyncio.create_task(client.post("/admin/rl_step", {"step": 3}))
        await until(lambda: disk.num_begun == 1 and worker.steps == [3])
        answer = await client.complete(body)
        assert answer["choices"][0]["token_ids"] == expected_tokens([1, 2], 5)
        assert not change.done(), "an answered change is in the file"
        assert "step " not in kept_of(state)
        disk.may_go_on.set()
        assert (await change)[0] == 200
        assert kept_of(state)["step "]["step"] == 3


async def test_changes_that_come_while_the_disk_hangs_are_written_together_in_their_order(
    start_router: StartRouter, tmp_path: Path
) -> None:
    state = tmp_path / "router.json"
    async with (
        ScriptedWorker() as worker,
        on_a_slow_disk(start_router, worker, state) as (client, disk),
    ):
        changes = [asyncio.create_task(client.post("/admin/pause", {}))]
        await until(lambda: disk.num_begun == 1)
        entries = client.router._service.changes.entries
        for path, body in (("resume", {}), ("pause", {"job": "math"}), ("pause", {}), ("resume", {})):
            before = entries.digest
            changes.append(asyncio.create_task(client.post(f"/admin/{path}", body)))
            await until(lambda before=before: entries.digest != before)  # type: ignore[misc]
        assert not any(change.done() for change in changes)
        disk.may_go_on.set()
        assert [status for status, _ in await asyncio.gather(*changes)] == [200] * 5
        assert kept_of(state) == {"paused ": False, "paused math": True}
        assert (disk.num_begun, disk.most_at_once) == (2, 1)


async def test_a_change_whose_admin_has_left_is_kept_and_no_other_write_meets_it(
    start_router: StartRouter, tmp_path: Path
) -> None:
    state = tmp_path / "router.json"
    async with (
        ScriptedWorker() as worker,
        on_a_slow_disk(start_router, worker, state) as (client, disk),
    ):
        left = asyncio.create_task(client.post("/admin/pause", {"job": "math"}))
        await until(lambda: disk.num_begun == 1)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await asyncio.sleep(0.2)  # the router has noticed
        other = asyncio.create_task(client.post("/admin/pause", {"job": "code"}))
        await asyncio.sleep(0.2)
        assert disk.most_at_once == 1
        disk.may_go_on.set()
        assert (await other)[0] == 200
        assert kept_of(state) == {"paused math": True, "paused code": True}
        assert disk.most_at_once == 1
