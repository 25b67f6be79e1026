"""A running pair, as the commands and the dashboard of the cluster's scheduler show it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from browser import CHROMEDRIVER, CHROMIUM, Browser
from http_calls import wait_answers

from rose.config import child_environment
from rose.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or CHROMEDRIVER is None or len(os.sched_getaffinity(0)) < 2,
        reason="no browser: sudo apt-get install chromium chromium-driver; or one core, which can't be split",
    ),
]
STOP_S = 120.0


def write_job(folder: Path, name: str) -> Path:
    rewards = str(folder / f"{name}.jsonl")
    tiny = ["--rewards", rewards, "--width", "32", "--max-tokens", "64", "--samples", "4"]
    spec = {
        "name": name,
        "command": [sys.executable, "-m", "rose.measure.tiny_pipeline", *tiny],
        "max_tokens": 64,
        "iterations": 100_000,
        "phases": {"rollout": {}, "train": {}},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def test_page_and_explain_show_the_pair_until_it_is_stopped(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    address = f"127.0.0.1:{free_port()}"
    rose = [sys.executable, "-m", "rose.cli", "sched"]
    environment = child_environment({"ROSE_RUNTIME_DIR": str(tmp_path / "run")})
    jobs = [str(write_job(tmp_path, name)) for name in ("math", "code")]
    pair = subprocess.Popen([*rose, "multiplex", *jobs, "--http", address], env=environment)
    try:
        wait_answers(f"http://{address}/")
        with Browser(tmp_path) as browser:
            browser.open(f"http://{address}/")
            browser.wait_for("[data-device] .state", "^(trial|shared|serial)$")
            browser.wait_for("[data-pipeline=math]", "math")
            browser.wait_for("[data-decisions]", "ago, .*math .*; code ")
            browser.wait_for("[data-job=code] [data-label=State]", "^running")
            assert browser.value("document.getElementById('cluster').hidden")
            assert browser.errors == []
        said = subprocess.run(
            [*rose, "explain", "--job", "math"], env=environment, capture_output=True, text=True, check=True
        ).stdout
        assert said.startswith("math is running: shares this machine with code, ")
        listed = subprocess.run(
            [*rose, "status"], env=environment, capture_output=True, text=True, check=True
        ).stdout
        assert "math" in listed and "code" in listed
    finally:
        pair.send_signal(signal.SIGTERM)
        status = pair.wait(STOP_S)
    assert status == 130
    left = subprocess.run(["pgrep", "--full", str(tmp_path)], capture_output=True, text=True, check=False)
    assert left.stdout == "", "no pipeline, watcher or dashboard runs on"
