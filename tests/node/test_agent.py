"""`rose node` and `rose serve` on a real engine, as processes."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rose.config import Settings
from rose.node import checks
from rose.node.control import EngineControl
from rose.node.processes import ServerProcess

READY_TIMEOUT_S = 400
VLLM_FLAGS = ["--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"]


def wait_until(is_true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


def processes_with(text: str) -> list[str]:
    """Command lines of running processes that mention ``text``."""
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return [line.replace(b"\0", b" ").decode() for line in lines if text.encode() in line]


def pid_of(name: str, log: Path) -> int:
    found = re.search(rf"started name={name} pid=(\d+)", log.read_text())
    assert found is not None
    return int(found[1])


def top(url: str) -> str:
    argv = [sys.executable, "-m", "rose.cli", "top", "--worker", url, "--once"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from rose.demo.models import make_serving_model

    return make_serving_model(tmp_path_factory.mktemp("model"))


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_node_reports_a_killed_engine_and_leaves_nothing_running(
    model: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    port, log = checks.free_port(), tmp_path / "node.log"
    (tmp_path / "NODE.yaml").write_text(
        "pool: {name: agent-test, num_slabs: 32, headroom_slabs: 4}\n"
        f"engines: [{{model: {model}, role: serving, port: {port}, vllm_args: {VLLM_FLAGS!r}}}]\n"
    )
    argv = [sys.executable, "-m", "rose.cli", "node", str(tmp_path / "NODE.yaml")]
    with ServerProcess(argv, "node", log) as node:
        node.wait_until(lambda: f"ready name=serving-{port}" in log.read_text(), "engine", READY_TIMEOUT_S)
        assert "serving" in top(f"http://127.0.0.1:{port}")
        assert len(list(runtime_dir.glob("engine-*.page"))) == 1
        os.kill(pid_of(f"serving-{port}", log), signal.SIGKILL)
        assert node.wait(60) == 1
    assert list(runtime_dir.glob("engine-*.page")) == []
    text = log.read_text()
    assert text.count("ERROR") == 1 and f"died name=serving-{port} status=-9" in text
    assert "rose: error: node: every engine of this node has died" in text
    wait_until(lambda: processes_with(str(model)) == [])
    assert checks.find_pool(Settings.from_environment(), "agent-test") is None


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_serve_ends_cleanly_on_sigterm(model: Path, runtime_dir: Path, tmp_path: Path) -> None:
    port = checks.free_port()
    rose = [sys.executable, "-m", "rose.cli"]
    pool = [*rose, "pool", "serve-test", "--num-slabs", "32", "--headroom-slabs", "4"]
    serve = [*rose, "serve", str(model), "--role", "serving", "--pool", "serve-test"]
    serve += ["--port", str(port), *VLLM_FLAGS]
    with ServerProcess(pool, "pool", tmp_path / "pool.log") as daemon:
        settings = Settings.from_environment()
        daemon.wait_until(lambda: checks.find_pool(settings, "serve-test") is not None, "answer", 30)
        with ServerProcess(serve, "serve", tmp_path / "serve.log") as server:
            log = tmp_path / "serve.log"
            server.wait_until(lambda: "ready url=" in log.read_text(), "engine", READY_TIMEOUT_S)
            control = EngineControl(f"http://127.0.0.1:{port}", str(model))
            ((tokens, _),) = control.complete([[5, 6, 7]], max_tokens=4)
            assert len(tokens) == 4
            control.close()
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
            assert list(runtime_dir.glob("engine-*.page")) == []
        wait_until(lambda: processes_with(str(model)) == [])
