"""What a router of its own remembers by default, over its death."""

import signal
from pathlib import Path

import aiohttp
import pytest

from rose.ports import free_port
from tests.scheduler.rollout.conftest import router_process


@pytest.mark.slow
async def test_a_router_keeps_what_an_admin_sets_by_default_where_it_has_an_address_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_STATE_DIR", str(tmp_path / "state"))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as http:

        async def weight() -> float | None:
            async with http.get(f"{url}/admin/jobs") as response:
                jobs = (await response.json())["jobs"]
                return jobs["math"]["weight"] if "math" in jobs else None

        async with router_process(port) as killed:
            async with http.put(f"{url}/admin/jobs/math", json={"weight": 3.0}) as response:
                assert response.status == 200
            killed.send_signal(signal.SIGKILL)
            await killed.wait()
        async with router_process(port):
            async with http.put(f"{url}/admin/jobs/math", json={}) as response:
                assert response.status == 200
            assert await weight() == 3.0
    (kept,) = (tmp_path / "state").iterdir()
    assert kept.name.endswith(f"-127.0.0.1-{port}.json") and kept.stat().st_mode & 0o777 == 0o600
    kept.unlink()
    nothing = tmp_path / "nothing.yaml"
    nothing.write_text("{state: null}")
    for own_port, flags in ((0, []), (port, [str(nothing)])):
        async with router_process(own_port, *flags):
            assert list((tmp_path / "state").iterdir()) == []


async def test_a_router_without_a_folder_for_its_state_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROSE_STATE_DIR", str(tmp_path / "file" / "state"))
    async with router_process(free_port()) as router:
        assert router.returncode is None
