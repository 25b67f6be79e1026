"""Pages of engines that were killed together with whatever had started them."""

import os
import subprocess
from pathlib import Path

from rose.config import Settings
from rose.engine.status import Field, StatusPage, page_path
from rose.node.launch import remove_dead_status_pages


def make_page(runtime_dir: Path, engine_id: str, pid: int) -> tuple[StatusPage, Path]:
    path = page_path(runtime_dir, engine_id)
    page = StatusPage(path, create=True)
    page.put(Field.PID, pid)
    return page, path


def test_the_status_pages_of_dead_engines_go_and_all_others_stay(runtime_dir: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    _dead, dead_path = make_page(runtime_dir, "rollout-1", ended.pid)
    _alive, alive_path = make_page(runtime_dir, "serving-1", os.getpid())
    _starting, starting_path = make_page(runtime_dir, "rollout-2", 0)
    empty_path = page_path(runtime_dir, "rollout-3")
    empty_path.touch()
    remove_dead_status_pages(Settings.from_environment())
    assert not dead_path.exists()
    assert alive_path.exists() and starting_path.exists() and empty_path.exists()
