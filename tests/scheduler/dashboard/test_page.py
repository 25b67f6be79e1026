"""The dashboard's page in a real browser, on a real scheduler with jobs that sleep."""

import os
import signal
from pathlib import Path

import pytest
from browser import CHROMEDRIVER, CHROMIUM, Browser
from http_calls import wait_answers
from served_cluster import ServedCluster

from rose.ports import free_port
from rose.scheduler.runtime.channel.messages import Cancel

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or CHROMEDRIVER is None,
    reason="no browser: sudo apt-get install chromium chromium-driver",
)

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


@pytest.mark.slow
def test_the_page_follows_jobs_and_says_when_the_scheduler_is_gone(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    groups = {"main": {"num_rollout_nodes": 2}, HOSTILE: {}}
    with ServedCluster(tmp_path, http=address, groups=groups) as cluster:
        wait_answers(f"http://{address}/")
        with Browser(tmp_path) as browser:
            browser.open(f"http://{address}/")
            browser.wait_for("#newcomer", "rose sched submit job.yaml")

            for node, name in enumerate(("long-a", "long-b")):
                spec = {"rollout_nodes": [node], "rollout_s": 3600.0, "train_s": 1200.0}
                assert cluster.submit(name, **spec).error is None
            _sees_two_sharing(browser)

            assert cluster.submit("short", group=HOSTILE).error is None
            browser.wait_for("[data-job=short] [data-label=State]", "^done")
            assert "3 of 3" in browser.text("[data-job=short] [data-label=Iterations]")
            browser.wait_for("[data-job=short] .name", "^short\ngroup <img src=x")
            assert browser.value("document.querySelectorAll('img').length") == 0
            cluster.ask(Cancel, job="long-b")
            browser.wait_for("[data-job=long-b] [data-label=State]", "^cancelled")
            browser.wait_for("[data-tile='Jobs running']", "1\n1 done, 1 cancelled")
            assert browser.errors == []

            scheduler = cluster.status()["scheduler_pid"]
            os.kill(scheduler, signal.SIGSTOP)
            try:
                browser.wait_for("#alert", r"scheduler can't be reached since .* \(.* ago\)")
                assert "long-a" in browser.text("#jobs"), "what was last heard is kept"
            finally:
                os.kill(scheduler, signal.SIGCONT)
            browser.wait_for("#live", "^live")
            browser.wait_for("#alert", "^$")
            assert browser.errors == []

            cluster.server.stop()
            browser.wait_for("#alert", "own server can't be reached since")


@pytest.mark.slow
def test_the_page_says_who_takes_whose_place(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    pools = {
        kind: {"name": kind, "dollars_per_gpu_hour": 2.0, "num_nodes": 1} for kind in ("rollout", "train")
    }
    cluster = ServedCluster(
        tmp_path, http=address, groups={}, pools=pools, policy="solo", preemption={"by_priority": True}
    )
    with cluster, cluster.held(0, "low"):
        wait_answers(f"http://{address}/")
        for name, priority in (("low", 0), ("high", 5)):
            assert cluster.submit(name, group=None, priority=priority).error is None
        with Browser(tmp_path) as browser:
            browser.open(f"http://{address}/")
            browser.wait_for(
                "[data-job=low] [data-preemption]", "^gives its place to high after this iteration, not"
            )
            browser.wait_for(
                "[data-job=high] [data-preemption]", "^takes the place of low after its iteration 0, not"
            )
            assert browser.errors == []


def _sees_two_sharing(browser: Browser) -> None:
    for name in ("long-a", "long-b"):
        browser.wait_for(f"[data-job={name}] [data-label=State]", "^running")
        browser.wait_for(f"[data-job={name}] [data-label=Now]", "^holds rollout")
    bars = "[...document.querySelectorAll('[data-group=main] svg[data-node] .bar')].map((b) => b.dataset.job)"
    assert sorted(browser.value(bars)) == ["long-a", "long-a", "long-b", "long-b"]
    rects = "[...document.querySelectorAll('[data-node=rollout-0] rect')]"
    track, bar = browser.value(f"{rects}.map((rect) => rect.getBoundingClientRect().width)")
    assert bar / track == pytest.approx(3600 / 4800, rel=0.02), "as long as its part of the cycle"
    assert "rollout 25 %, training 50 %" in browser.text("[data-group=main] [data-bubbles]")
    assert "certified 1.00×" in browser.text("[data-job=long-a] [data-label=SLO]")
    # Two H20 nodes and one H800 node, against two of each.
    assert "$71.84/h" in browser.text("[data-tile='Cost now']")
    assert "$114.08/h" in browser.text("[data-tile='Every job solo']")
