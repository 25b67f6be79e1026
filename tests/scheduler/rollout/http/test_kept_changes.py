"""What an admin's changes do where they can't be kept, and what is kept of them."""

import json
from pathlib import Path
from typing import Any

from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import ScriptedWorker


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
