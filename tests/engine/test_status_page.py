"""The page of counters between an engine's scheduler and its HTTP endpoint."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from rose.engine.harm_records import HarmRecords
from rose.engine.status import Field, StatusPage, page_path
from rose.errors import ConfigError


def test_what_the_scheduler_writes_the_endpoint_reads(tmp_path: Path) -> None:
    path = page_path(tmp_path, "rollout-1")
    scheduler = StatusPage(path, create=True)
    endpoint = StatusPage(path, create=False)
    scheduler.put(Field.NUM_RUNNING, 3)
    scheduler.count(Field.STEPS)
    scheduler.count(Field.STEPS, 4)
    assert (endpoint.get(Field.NUM_RUNNING), endpoint.get(Field.STEPS)) == (3, 5)
    endpoint.put(Field.RL_STEP, 7)
    assert scheduler.get(Field.RL_STEP) == 7
    assert endpoint.get(Field.PID) == os.getpid()


def test_no_gate_mode_is_wanted_until_somebody_asks(tmp_path: Path) -> None:
    page = StatusPage(page_path(tmp_path, "serving-1"), create=True)
    assert page.get(Field.WANTED_GATE_MODE) == -1


def test_the_page_is_private_and_goes_with_its_scheduler(tmp_path: Path) -> None:
    path = page_path(tmp_path, "rollout-1")
    scheduler = StatusPage(path, create=True)
    endpoint = StatusPage(path, create=False)
    assert path.stat().st_mode & 0o777 == 0o600
    endpoint.close()
    assert path.exists()
    scheduler.close()
    assert not path.exists()


def test_an_endpoint_without_its_scheduler_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        StatusPage(page_path(tmp_path, "gone"), create=False)


def test_a_new_scheduler_starts_its_counters_at_zero(tmp_path: Path) -> None:
    path = page_path(tmp_path, "rollout-1")
    StatusPage(path, create=True).put(Field.STEPS, 9)
    assert StatusPage(path, create=True).get(Field.STEPS) == 0


def test_the_page_says_where_the_engine_answers(tmp_path: Path) -> None:
    path = page_path(tmp_path, "serving-1")
    scheduler, endpoint = StatusPage(path, create=True), StatusPage(path, create=False)
    assert scheduler.url == ""
    endpoint.put_url("http://127.0.0.1:8000")
    assert scheduler.url == "http://127.0.0.1:8000"
    endpoint.put_url("http://" + 400 * "x")
    assert scheduler.url == "http://127.0.0.1:8000"
    assert scheduler.get(Field.PID) == os.getpid()


@pytest.mark.parametrize("make", [StatusPage, HarmRecords])
def test_a_disk_that_fills_up_later_ends_no_engine_that_writes_to_its_files(
    tmp_path: Path, make: Callable[..., object]
) -> None:
    path = tmp_path / "shared"
    made = make(path, create=True)
    stat = path.stat()
    assert stat.st_blocks * 512 >= stat.st_size > 0, made


@pytest.mark.parametrize("make", [StatusPage, HarmRecords])
def test_an_engine_without_room_for_its_files_is_told_which_folder_is_full(
    tmp_path: Path, make: Callable[..., object]
) -> None:
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(ConfigError, match=f"ROSE_RUNTIME_DIR: {tmp_path} can't take"):
            make(tmp_path / "shared", create=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
