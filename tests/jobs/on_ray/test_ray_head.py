"""A Ray head with its state in Redis goes away and comes back: jobs go on, and the scheduler returns."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from lib.cluster.ray_rig import RayRig
from lib.cluster.redis_server import RedisServer, why_no_redis
from served_cluster import kill, wait_until

from rose.jobs.on_ray.cluster import LIMIT_SETTING
from rose.scheduler.runtime.channel.messages import Cancel
from tests.jobs.on_ray.ray_rig import HEADLESS_S, OnRay

pytestmark = pytest.mark.slow

FOREVER = 1_000_000
LIMIT_S = 600
"""Ray's processes do without their head for so long."""
AWAY_S = HEADLESS_S / 2 + 5
"""Longer than the head may be away with the shared cluster's setting, as test_ray_nodes.py shows."""


@pytest.fixture(scope="module")
def durable_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRig]:
    """A Ray cluster whose head keeps its state in Redis."""
    if (reason := why_no_redis()) is not None:
        pytest.skip(reason)
    with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        where = redis.url.removeprefix("redis://").partition("/")[0]
        settings = {LIMIT_SETTING: LIMIT_S}
        rig = RayRig(tmp_path_factory.mktemp("run"), 2, redis=where, settings=settings)
        try:
            yield rig
        finally:
            rig.cluster.shutdown()


def test_jobs_and_the_scheduler_go_on_while_the_heads_server_is_away(
    durable_rig: RayRig, tmp_path: Path
) -> None:
    rig = durable_rig
    with OnRay(tmp_path, rig.address) as served:
        served.submit("a", iterations=FOREVER)
        served.submit("crashes", iterations=FOREVER, max_restarts=1)
        wait_until(lambda: all(done(served, name) >= 1 for name in ("a", "crashes")), "two jobs that run")
        rig.stop_head()
        wait_until(lambda: "the Ray head at" in str(served.status().get("waits_for")), "it to be noticed")
        kill(served.status()["scheduler_pid"])
        wait_until(
            lambda: "the Ray head at" in str(served.status().get("waits_for")), "the next one to be told"
        )
        before, since_s = done(served, "a"), time.monotonic()
        psutil.Process(served.notes("crashes", "phase")[-1]["pid"]).kill()
        served.submit("late", iterations=1)
        wait_until(lambda: time.monotonic() > since_s + AWAY_S, "the time to pass")
        assert served.server.is_alive()
        assert done(served, "a") > before + 10
        late = served.job("late")
        assert late["state"] == "queued" and "the Ray head at" in str(late)
        rig.start_head()
        wait_until(lambda: served.status().get("waits_for") is None, "the head to be noticed")
        wait_until(lambda: served.job("crashes")["attempt"] == 2, "the end of the job that was killed")
        kept = done(served, "crashes")
        wait_until(lambda: done(served, "crashes") > kept + 1, "its next attempt")
        served.ask(Cancel, job="crashes")
        wait_until(lambda: served.job("late")["is_over"], "the job that came meanwhile")
        assert (served.job("a")["attempt"], served.job("late")["state"]) == (1, "done")
        served.end_jobs()


def test_jobs_and_the_scheduler_go_on_when_the_heads_whole_node_is_another(
    durable_rig: RayRig, tmp_path: Path
) -> None:
    rig = durable_rig
    with OnRay(tmp_path, rig.address) as served:
        served.submit("a", iterations=FOREVER)
        wait_until(lambda: done(served, "a") >= 1, served.server.log_tail())
        rig.replace_head()
        served.submit("b", iterations=1)
        wait_until(lambda: served.job("b")["is_over"], served.server.log_tail())
        served.kill()  # as where the scheduler ran on the head's host
        served.start_again()
        wait_until(lambda: served.status().get("waits_for") is None, "the cluster to be joined again")
        kept = done(served, "a")
        wait_until(lambda: done(served, "a") > kept + 10, "the job to go on")
        assert (served.job("a")["attempt"], served.job("a")["restarts"]) == (1, 0)
        served.submit("c", iterations=1)
        wait_until(lambda: served.job("c")["is_over"], served.server.log_tail())
        assert [served.job(name)["state"] for name in "bc"] == ["done", "done"]
        served.end_jobs()


def done(served: OnRay, job: str) -> int:
    return int(served.job(job)["iterations"][0])
