"""What the dashboard shows of an engine that serves and fine-tunes, beside no scheduler."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from browser import CHROMEDRIVER, CHROMIUM, Browser
from http_calls import get, wait_answers
from served_cluster import wait_until

from rose.errors import ConfigError
from rose.messages import WorkerStatus
from rose.node.processes import ServerProcess
from rose.ports import free_port
from rose.scheduler.dashboard.nodes import NodeFeed

TEXTS = [" ".join(f"w{number}" for number in range(start, start + 24)) for start in range(0, 72, 6)]


async def test_an_engine_that_does_not_answer_is_a_state_and_gives_the_reason() -> None:
    feed = NodeFeed(f"http://127.0.0.1:{free_port()}/", None, None)
    state = await feed.state()
    assert (state["is_reachable"], state["engine"], state["answered_at"]) == (False, None, None)
    assert "refused" in state["error"]
    feed.close()


@pytest.mark.parametrize(
    "url", ["gpu0", "http://gpu0:80a", "http://gpu 0:80", "http://:80", "http://gpu0:0", "http://gpu0:99999"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=rf"--node {url}: expected the engine's URL"):
        NodeFeed(url, None, None)


STATUS = {name: 0 for name, field in WorkerStatus.model_fields.items() if field.is_required()} | {
    "role": "serving",
    "model": "tiny",
    "engine_id": "a",
    "weight_version": None,
    "pressure": "normal",
    "gate": {"mode": "off", "admitted_steps": 0, "declined_steps": 0},
}


@pytest.mark.parametrize(
    ("metrics", "error"),
    [
        ("rose_pauses_total 3", None),
        ("rose_pauses_total many", "its answer is not that of a ROSE engine"),
        ('rose_gate_decisions_total{role="a"} 1', "its answer is not that of a ROSE engine"),
        ("rose_{=,\t={,}.", "its answer is not that of a ROSE engine"),
    ],
)
async def test_metrics_that_cannot_be_read_are_a_state_too(metrics: str, error: str | None) -> None:
    async def status(_: web.Request) -> web.Response:
        return web.json_response(STATUS)

    async def told(_: web.Request) -> web.Response:
        return web.Response(text=f"{metrics}\n")

    app = web.Application()
    app.add_routes([web.get("/rose/v1/status", status), web.get("/metrics", told)])
    async with TestServer(app) as server:
        feed = NodeFeed(str(server.make_url("")), None, None)
        state = await feed.state()
        assert (state["is_reachable"], state["error"]) == (error is None, error)
        feed.close()


@contextmanager
def dashboard(folder: Path, *nodes: str) -> Iterator[str]:
    base = f"127.0.0.1:{free_port()}"
    argv = [sys.executable, "-m", "rose.cli", "sched", "dashboard", "--http", base]
    argv += ["--channel", f"unix:{folder}", *(f"--node={url}" for url in nodes)]
    with ServerProcess(argv, "page", folder / "page.log").start():
        wait_answers(f"http://{base}/")
        yield f"http://{base}"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None or CHROMEDRIVER is None,
    reason="no browser: sudo apt-get install chromium chromium-driver",
)
def test_a_node_that_serves_and_fine_tunes_is_seen_at_both() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    from tests.trainers.fine_tune.fine_tuned_engine import Served

    with TemporaryDirectory(prefix="rose-test-") as name:  # short, as a socket's path may have 107 bytes
        folder = Path(name)
        served = Served(folder, [{"text": text} for text in TEXTS], "--fine-tune-publish-s", "3")
        gone = f"http://127.0.0.1:{free_port()}"
        try:
            with dashboard(folder, served.url, gone) as base, Browser(folder) as browser:

                def engine() -> dict[str, Any]:
                    [node, _] = get(f"{base}/api/v1/state").json()["nodes"]
                    return node["engine"] or {}

                def guest_share() -> float:
                    assert "died name=trainer" not in served.log.read_text()
                    return engine().get("guest_share") or 0.0

                wait_until(lambda: guest_share() > 0.1, "the trainer's share")
                served.answers(["w1 w2"], max_tokens=64)
                wait_until(lambda: (engine().get("serving_share") or 0.0) > 0.0, "serving's share")
                wait_until(lambda: engine()["num_in_place"] + engine()["num_whole"] > 0, "new weights")
                found = engine()
                assert found["model"] == "tiny" and found["weight_version"] is not None
                assert found["serving_share"] + found["guest_share"] <= 1.05
                assert found["guest_steps_per_s"] > 0 and found["guest_s"] > 0

                browser.open(f"{base}/")
                node = f"[data-node-url='{served.url}']"
                browser.wait_for(f"{node} [data-shares]", r"training and rollouts [1-9]\d? %")
                browser.wait_for(node, r"Weights\s+\S+/\d+")
                browser.wait_for(f"[data-node-url='{gone}']", "no answer: .*refused")
                browser.wait_for("#live", "no scheduler")
                assert browser.text("#alert") == "" and browser.text("#pools") == ""
                assert browser.errors == []
        except BaseException:
            print(served.log.read_text()[-8000:], file=sys.stderr)
            raise
        finally:
            served.close()
