"""What a trainer announces to its routers: RL steps, and which weights it has published."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from rose.config import Settings
from rose.errors import ConfigError, WorkerError
from rose.messages import parse_version
from rose.ports import free_port
from rose.scheduler.rollout.http.command import RunningRouter
from rose.signature import Signer, make_signing_key
from rose.trainers.router import router_announcer
from rose.transfer.publish import announcer
from rose.transfer.publish.announcer import RunAnnouncer
from rose.transfer.publish.publisher import WeightPublisher
from rose.types import WeightVersion
from tests.scheduler.rollout.conftest import StartRouter, running_router
from tests.scheduler.rollout.scripted_worker import ScriptedWorker
from tests.scheduler.rollout.test_routers import SHORT, two_routers
from tests.scheduler.rollout.waiting import until
from tests.transfer.relay_process import RelayProcess

SIGNING_KEY = make_signing_key()


def announcer_of(urls: str, signer: Signer | None = None) -> RunAnnouncer:
    return RunAnnouncer.of(Settings.from_environment({"ROSE_ROUTER_URL": urls}), signer)


async def tell(routers: RunAnnouncer, number: int) -> None:
    await asyncio.to_thread(routers.announce, WeightVersion(run_id="run", number=number))


@pytest.fixture
def relay() -> Iterator[RelayProcess]:
    process = RelayProcess("embedded")
    yield process
    process.stop()


async def test_a_step_is_announced_to_a_router_that_answers() -> None:
    async with ScriptedWorker() as worker, running_router(worker.url) as router:
        gone = f"http://127.0.0.1:{free_port()}"
        await asyncio.to_thread(router_announcer(f"{gone},{router.url}", None), 4)
        assert worker.steps == [4]
        with pytest.raises(WorkerError, match="RL step 5 could not be announced"):
            await asyncio.to_thread(router_announcer(gone, None), 5)


async def test_a_router_with_the_public_key_believes_only_announcements_that_the_trainer_signed() -> None:
    signing_key, other_key = make_signing_key(), make_signing_key()
    async with (
        ScriptedWorker() as worker,
        running_router(worker.url, public_key=Signer(signing_key).public_key) as router,
    ):
        newest = router.plane.registry.newest

        async def announce(number: int, key: str | None) -> int:
            published = WeightVersion(run_id="run", number=number)
            await asyncio.to_thread(router_announcer(router.url, None, lambda: published, key), number)
            return newest.bound("run")

        assert await announce(7, signing_key) == 7
        with pytest.raises(WorkerError, match=r"400 .*announced version is not signed"):
            await announce(1, None)
        with pytest.raises(WorkerError, match=r"400 .*does not belong to ROSE_PUBLIC_KEY"):
            await announce(99, other_key)
        assert await announce(6, signing_key) == 7, "an older announcement that is sent again"
        assert await announce(8, signing_key) == 8
        assert worker.steps == [7, 6, 8]


async def test_the_newest_signed_announcement_of_each_run_holds_after_a_restart(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"public_key": Signer(SIGNING_KEY).public_key, "state": tmp_path / "kept"}
    async with ScriptedWorker() as worker:
        async with running_router(worker.url, **settings) as router:
            for version in ("run/7", "other/3", "run/6"):
                await announce_signed(router, version)
        async with running_router(worker.url, **settings) as router:
            newest = router.plane.registry.newest
            assert (newest.bound("run"), newest.bound("other")) == (7, 3)


async def test_an_older_announcement_of_which_a_peer_was_told_later_is_replaced(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"public_key": Signer(SIGNING_KEY).public_key, **SHORT}
    late = {**settings, "state": tmp_path / "late"}
    async with running_router(**settings, state=tmp_path / "one") as one:
        await announce_signed(one, "run/8")
        async with running_router(**late) as other:
            for version in ("run/6", "run/7"):  # the entry that was set most often would replace the other
                await announce_signed(other, version)
        async with running_router(**late, peers=(one.url,)) as other:
            newest = [router.plane.registry.newest for router in (one, other)]
            await until(lambda: [each.bound("run") for each in newest] == [8, 8])
            await until(lambda: {kept_version(tmp_path / name) for name in ("one", "late")} == {"run/8"})


async def test_what_another_release_kept_has_its_effect_or_is_named_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier releases named the entry of an announced step without its run."""
    settings: dict[str, Any] = {"public_key": Signer(SIGNING_KEY).public_key, "state": tmp_path / "kept"}
    async with running_router(**settings) as router:
        await announce_signed(router, "run/6")
    old = json.loads((tmp_path / "kept").read_text())["entries"]["step run"]
    async with running_router(**settings) as router:
        await announce_signed(router, "run/8")
    file = json.loads((tmp_path / "kept").read_text())
    later = {"version": 100, "writer": "a"}
    file["entries"] |= {
        "step ": {**old, "version": 99},
        "versions ": {**later, "value": {"mode": "latest"}},
        "dream a": {**later, "value": True},
    }
    (tmp_path / "kept").write_text(json.dumps(file))
    caplog.clear()
    async with running_router(**settings) as router:
        assert router.plane.registry.newest.bound("run") == 8
    lines = [each.getMessage() for each in caplog.records if "has no effect" in each.getMessage()]
    assert len(lines) == 2
    assert "versions because=it has no 'max_lag'; another release of ROSE wrote it: run one" in lines[0]
    assert "dream a because=this router knows worker, job, " in lines[1]
    assert kept_version(tmp_path / "kept") == "run/8"


async def test_a_run_that_was_only_announced_is_forgotten_at_every_router(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"public_key": Signer(SIGNING_KEY).public_key, **SHORT}
    async with running_router(**settings) as one, running_router(**settings, peers=(one.url,)) as other:
        await announce_signed(one, "run/8")
        await until(lambda: other.plane.registry.newest.bound("run") == 8)
        async with aiohttp.ClientSession() as http, http.delete(f"{one.url}/admin/runs/run") as answer:
            assert answer.status == 200
        await until(lambda: other.plane.registry.newest.bound("run") == 0)


async def announce_signed(router: RunningRouter, version: str) -> None:
    published = parse_version(version)
    assert published is not None
    announce = router_announcer(router.url, None, lambda: published, SIGNING_KEY)
    await asyncio.to_thread(announce, published.number)


def kept_version(state: Path) -> str:
    version = json.loads(state.read_text())["entries"]["step run"]["value"]["version"]
    assert isinstance(version, str)
    return version


async def test_what_a_peer_says_was_announced_counts_only_if_it_is_signed() -> None:
    signing_key = make_signing_key()
    async with (
        two_routers() as (one, other),
        running_router(
            peers=(one.router.url,), public_key=Signer(signing_key).public_key, **SHORT
        ) as careful,
    ):
        await one.post("/admin/rl_step", {"step": 1, "version": "run/9"})
        await until(lambda: other.router.plane.registry.newest.bound("run") == 9)
        published = WeightVersion(run_id="run", number=8)
        announce = router_announcer(one.router.url, None, lambda: published, signing_key)
        await asyncio.to_thread(announce, 2)
        await until(lambda: careful.plane.registry.newest.bound("run") == 8)


async def test_only_the_key_of_a_runs_job_says_what_the_run_has_published() -> None:
    jobs = {"math": {"key": "key-math", "run_id": "run"}, "plain": {"key": "key-plain"}}
    async with (
        ScriptedWorker() as worker,
        two_routers(worker.url, jobs=jobs, api_key="cli", admin_key="adm") as (one, other),
    ):
        for key, status in (("key-math", 200), ("key-plain", 403), ("cli", 403), ("adm", 401), ("", 401)):
            body = {"version": "run/3" if status == 200 else "run/9"}
            found, answer = await one.post("/published", body, Authorization=f"Bearer {key}")
            assert found == status, answer
        status, answer = await one.post("/published", {"version": "next/0"}, Authorization="Bearer key-math")
        assert (status, "that of job math, which has run run;" in answer["error"]["message"]) == (403, True)
        for number in ("", "/\N{SUPERSCRIPT TWO}", "/\N{ARABIC-INDIC DIGIT TWO}", "/" + "9" * 5000):
            body = {"version": f"run{number}"}
            assert (await one.post("/published", body, Authorization="Bearer key-math"))[0] == 400
        for wrong in ({"version": 3}, {}, {"version": "run/4", "step": 1}):
            assert (await one.post("/published", wrong, Authorization="Bearer key-math"))[0] == 400
        newest = [each.router.plane.registry.newest for each in (one, other)]
        await until(lambda: [each.bound("run") for each in newest] == [3, 3])
        assert (worker.steps, [each.bound("next") for each in newest]) == ([], [0, 0])


@pytest.mark.parametrize(("settings", "status"), [({}, 200), ({"admin_key": "adm"}, 403)])
async def test_without_any_key_everyone_may_say_what_a_run_has_published(
    start_router: StartRouter, settings: dict[str, str], status: int
) -> None:
    async with ScriptedWorker() as worker, start_router(worker, **settings) as client:
        assert (await client.post("/published", {"version": "run/0"}))[0] == status


async def test_a_publisher_tells_every_router_of_its_job_what_it_has_published(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, relay: RelayProcess
) -> None:
    settings: dict[str, Any] = {
        "jobs": {"math": {"key": "key-math", "run_id": "run"}},
        "public_key": Signer(SIGNING_KEY).public_key,
    }
    gone = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(announcer, "_TIMEOUT_S", 0.3)
    async with running_router(**settings) as one, running_router(**settings) as other:
        monkeypatch.setenv("ROSE_ROUTER_URL", f"{one.url},{gone},{other.url}")
        monkeypatch.setenv("ROSE_ROUTER_API_KEY", "key-math")
        weights = {"weight": torch.zeros(4, 4)}
        publisher = await asyncio.to_thread(
            WeightPublisher, weights, relay.url, "run", signing_key=SIGNING_KEY
        )
        try:
            for number in range(3):
                await asyncio.to_thread(publisher.publish)
                bounds = [router.plane.registry.newest.bound("run") for router in (one, other)]
                assert bounds == [number, number]
        finally:
            publisher.close()
        (warning,) = [line for line in caplog.messages if "was not told" in line]
        assert warning == (
            f"router {gone} was not told of run/0: [Errno 111] Connection refused. Turns there may get older"
            " weights until the next version is announced, or for 10 minutes"
        )


async def test_a_router_whose_connections_clients_hold_is_told_once_one_of_them_leaves() -> None:
    async with running_router(max_connections=1) as full:
        _, held = await asyncio.open_connection(*full.url.removeprefix("http://").split(":"))
        telling = asyncio.create_task(tell(announcer_of(full.url), 4))
        await asyncio.sleep(0.3)
        assert full.plane.registry.newest.bound("run") == 0
        held.close()
        await telling
        assert full.plane.registry.newest.bound("run") == 4


async def test_a_step_is_announced_while_clients_hold_every_connection() -> None:
    async with ScriptedWorker() as worker, running_router(worker.url, max_connections=1) as full:
        _, held = await asyncio.open_connection(*full.url.removeprefix("http://").split(":"))
        await asyncio.to_thread(router_announcer(full.url, None), 4)
        assert worker.steps == [4]
        held.close()


async def test_a_router_that_starts_again_meanwhile_is_told() -> None:
    port = free_port()
    telling = asyncio.create_task(tell(announcer_of(f"http://127.0.0.1:{port}"), 4))
    await asyncio.sleep(0.3)
    async with running_router(port=port) as late:
        await telling
        assert late.plane.registry.newest.bound("run") == 4


async def test_a_router_that_missed_a_version_is_told_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcer, "_TIMEOUT_S", 0.3)
    port = free_port()
    routers = announcer_of(f"http://127.0.0.1:{port}")
    await tell(routers, 4)
    async with running_router(port=port) as late:
        await tell(routers, 5)
        assert late.plane.registry.newest.bound("run") == 5
    routers.close()


async def test_a_draining_router_is_told_because_turns_still_wait_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ScriptedWorker() as worker, running_router(worker.url) as router:
        router_url = router.url
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{router_url}/admin/drain") as answer:
                assert answer.status == 200
            async with http.post(f"{router_url}/v1/completions", json={"prompt": [1]}) as answer:
                assert answer.status == 503
        await tell(announcer_of(router_url), 4)
        assert (router.plane.registry.newest.bound("run"), caplog.messages) == (4, [])


@asynccontextmanager
async def silent_server(came: Callable[[int], None]) -> AsyncIterator[str]:
    """A server that reads and answers nothing. `came` is called with 1 and -1 as clients come and leave."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came(1)
        while await reader.read(4096):
            pass
        came(-1)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_routers_that_do_not_answer_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "_TIMEOUT_S", 2.0)
    present = 0

    def came(change: int) -> None:
        nonlocal present
        present += change

    async with silent_server(came) as one, silent_server(came) as other:
        telling = asyncio.create_task(tell(announcer_of(f"{one},{other}"), 4))
        await until(lambda: present == 2, 30.0)
        await telling


async def test_a_router_that_could_not_be_told_is_asked_once_with_the_next_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcer, "_TIMEOUT_S", 0.5)
    num_asked = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        routers = announcer_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await tell(routers, 4)
        num_first = num_asked
        await tell(routers, 5)
        assert num_first > 1 and num_asked == num_first + 1


async def test_a_signed_version_that_is_older_than_the_last_is_refused_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    signer = Signer(SIGNING_KEY)
    async with running_router(public_key=signer.public_key) as router:
        routers = announcer_of(router.url, signer)
        await tell(routers, 7)
        await tell(routers, 6)
        assert router.plane.registry.newest.bound("run") == 7
        await tell(routers, 7)  # again: its answer was lost
    (warning,) = [line for line in caplog.messages if "was not told" in line]
    assert "409" in warning and "run/6 is older than run/7" in warning


@pytest.mark.parametrize("urls", ["http://router:80a", "http://router:8100,", "router:8100"])
def test_a_malformed_address_of_a_router_is_named_before_the_relay_is_opened(
    monkeypatch: pytest.MonkeyPatch, urls: str
) -> None:
    monkeypatch.setenv("ROSE_ROUTER_URL", urls)
    with pytest.raises(ConfigError, match=f"ROSE_ROUTER_URL={urls}: "):
        WeightPublisher({"weight": torch.zeros(4, 4)}, "embedded://127.0.0.1:1", "run")


async def test_turns_for_which_all_workers_are_too_old_end_with_what_helps_a_fast_trainer(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker(version="run/3") as worker, start_router(worker, weights_s=0.2) as client:
        assert (await client.post("/published", {"version": "run/4"}))[0] == 200
        status, answer = await client.post("/v1/completions", {"prompt": [1]}, X_Rose_Run="run")
        message = answer["error"]["message"]
        assert (status, f"workers: {worker.id} run/3" in message) == (503, True)
        assert "set version_mode max-lag" in message and "num_workers" in message
