"""`rose node`, `rose serve` and `rose profile` on real engines, as processes.

All three start at once. They and their engines are forked off a process that has loaded vLLM; in tests/ray
`rose node` starts its engine as in production.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tiny_models import make_deep_model, make_serving_model

from rose.node import checks
from rose.node.control import EngineControl
from tests.node.homes import END_TIMEOUT_S, READY_TIMEOUT_S, Home, wait_until

pytestmark = pytest.mark.vllm

VLLM_FLAGS = ["--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager"]


def top(url: str) -> str:
    argv = [sys.executable, "-m", "rose.cli", "top", "--worker", url, "--once"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Home]]:
    """Returns homes by the name of the command; all are on their way."""
    root = tmp_path_factory.mktemp("rose")
    model = make_serving_model(root / "model")
    with ExitStack() as undo:
        homes = {name: Home(root / name, model, undo) for name in ("serve", "profile")}
        node = homes["node"] = Home(root / "node", make_deep_model(root / "deep"), undo)
        (node.folder / "NODE.yaml").write_text(
            "pool: {name: agent-test, num_slabs: 16}\n"
            f"engines: [{{model: {node.model}, role: serving, port: {node.port}, "
            f"vllm_args: {VLLM_FLAGS!r}}}]\n"
        )
        node.start("node", str(node.folder / "NODE.yaml"))
        serve = homes["serve"]
        serve.start("pool", "serve-test", "--num-slabs", "32", "--headroom-slabs", "4")
        serve.processes["pool"].wait_until(lambda: serve.has_pool("serve-test"), "answer", READY_TIMEOUT_S)
        pool = ("--role", "serving", "--pool", "serve-test")
        port = ("--port", str(serve.port))
        serve.start("serve", str(serve.model), *pool, *port, *VLLM_FLAGS)
        profile = homes["profile"]
        plot = ("--plot", str(profile.folder / "profile.png"))
        flags = ("--role", "serving", *plot, *VLLM_FLAGS)
        profile.start("profile", str(profile.model), *flags)
        yield homes


def test_node_starts_its_pool_again_reports_a_killed_engine_and_leaves_nothing_running(
    homes: dict[str, Home],
) -> None:
    home = homes["node"]
    node, name = home.processes["node"], f"serving-{home.port}"
    node.wait_until(lambda: f"ready name={name}" in home.log("node"), "engine", READY_TIMEOUT_S)
    assert "serving" in top(home.url)
    # Chosen for the model's blocks: 2 MiB, the size without a model, would have refused the engine.
    pool = checks.find_pool(home.settings, "agent-test")
    assert pool is not None and (pool.slab_bytes, pool.headroom_slabs) == (20 << 20, 3)
    assert len(home.status_pages()) == 1
    daemon = re.search(r"started name=pool-agent-test pid=(\d+)", home.log("node"))
    assert daemon is not None
    os.kill(int(daemon[1]), signal.SIGKILL)
    node.wait_until(
        lambda: home.log("node").count("started name=pool-agent-test") == 2, "pool", END_TIMEOUT_S
    )
    node.wait_until(lambda: home.has_pool("agent-test"), "pool", END_TIMEOUT_S)
    control = EngineControl(home.url, str(home.model))
    ((tokens, _),) = control.complete([[5, 6, 7]], max_tokens=4)
    control.close()
    assert len(tokens) == 4
    started = re.search(rf"started name={name} pid=(\d+)", home.log("node"))
    assert started is not None
    os.kill(int(started[1]), signal.SIGKILL)
    assert node.wait(END_TIMEOUT_S) == 1
    assert home.status_pages() == []
    text = home.log("node")
    assert text.count("ERROR") == 2 and f"died name={name} status=-9" in text
    assert "rose: error: node: every engine of this node has died" in text
    wait_until(lambda: home.running("node") == [])
    assert not home.has_pool("agent-test")


def test_serve_ends_cleanly_on_sigterm(homes: dict[str, Home]) -> None:
    home = homes["serve"]
    server = home.processes["serve"]
    server.wait_until(lambda: "ready url=" in home.log("serve"), "engine", READY_TIMEOUT_S)
    control = EngineControl(home.url, str(home.model))
    ((tokens, _),) = control.complete([[5, 6, 7]], max_tokens=4)
    assert len(tokens) == 4
    control.close()
    server.send_signal(signal.SIGTERM)
    assert server.wait(END_TIMEOUT_S) == 0
    assert home.status_pages() == []
    wait_until(lambda: home.running("serve") == [])


def test_an_engine_profiles_itself_and_the_profile_stays(homes: dict[str, Home]) -> None:
    home = homes["profile"]
    assert home.processes["profile"].wait(READY_TIMEOUT_S) == 0, home.log("profile")
    assert (home.folder / "profile.png").stat().st_size > 1000
    (stored,) = (home.folder / "cache" / "profiles").glob("*.json")
    profile = json.loads(stored.read_text())
    assert profile["model"]["base_s"] >= 0
    assert len(profile["observations"]) > 32
    assert str(stored) in home.log("profile")
    assert home.status_pages() == []
