"""The dashboard's routes on a real scheduler."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from http_calls import TIMEOUT_S, cluster_of, get, wait_answers
from prometheus_client.parser import text_string_to_metric_families
from served_cluster import ServedCluster, kill, wait_until

from rose.node import watcher
from rose.node.processes import ServerProcess
from rose.ports import free_port


@pytest.fixture(scope="module")
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, address: str) -> Iterator[ServedCluster]:
    with ServedCluster(tmp_path_factory.mktemp("page"), http=address) as served:
        wait_answers(f"http://{address}/")
        wait_until(lambda: get(f"http://{address}/api/v1/state").json()["is_reachable"], "the scheduler")
        yield served


def samples(address: str) -> dict[tuple[str, ...], float]:
    """Returns samples by name and label values, once the scheduler has answered the dashboard in time."""
    found: dict[tuple[str, ...], float] = {}

    def is_up() -> bool:
        families = text_string_to_metric_families(get(f"http://{address}/metrics").text)
        told = [each for family in families for each in family.samples]
        found.update({(each.name, *each.labels.values()): each.value for each in told})
        return found["rose_sched_up",] == 1

    wait_until(is_up, "metrics of a scheduler")
    return found


@pytest.mark.slow
def test_state_and_metrics_tell_of_a_job_to_its_end(cluster: ServedCluster, address: str) -> None:
    assert cluster.submit("a").error is None
    cluster.wait_state("a", "done")
    wait_until(lambda: cluster_of(f"http://{address}")["states"] == {"done": 1}, "the answer to be new")
    state = cluster_of(f"http://{address}")
    [job] = state["jobs"]
    assert (job["name"], job["iterations"], job["slo"]["num_observed"]) == ("a", [3, 3], 2)
    assert job["slo"]["observed_worst"] >= job["slo"]["observed_mean"] > 0
    assert state["events"][0]["event"] == "done"
    found = samples(address)
    assert found["rose_sched_jobs", "done"] == 1
    assert found["rose_sched_iterations_total", "a"] == 3
    assert found["rose_sched_resubmissions_total", "a"] == 0
    assert found["rose_sched_slowdown", "a", "slo"] == 100.0
    for phase in ("rollout", "train"):
        assert found["rose_sched_permit_wait_seconds_count", phase] == 3
        assert found["rose_sched_permit_hold_seconds_count", phase] == 3
        assert found["rose_sched_permit_hold_seconds_sum", phase] >= 3 * 0.05
    assert found["rose_sched_events_total", "completed"] == 3
    assert found["rose_sched_decision_seconds_count", "submit"] == 1
    assert found["rose_sched_nodes", "rollout", "empty"] == 1


@pytest.mark.slow
def test_a_killed_dashboard_comes_back_and_no_job_notices(cluster: ServedCluster, address: str) -> None:
    cluster.submit("b", rollout_s=3600.0)
    wait_until(lambda: cluster.job("b")["holds"] == "rollout", "its rollout")
    scheduler = cluster.status()["scheduler_pid"]
    children = psutil.Process(cluster.server.pid).children()
    [page] = [each for each in children if "rose.scheduler.dashboard.server" in each.cmdline()]
    kill(page.pid)
    wait_until(lambda: watcher.group_members(page.pid) == [], "its end")
    wait_answers(f"http://{address}/metrics")
    assert cluster.status()["scheduler_pid"] == scheduler
    assert cluster.job("b")["attempt"] == 1


def test_nothing_can_be_written(cluster: ServedCluster, address: str) -> None:
    for path in ("/", "/api/v1/state", "/metrics"):
        assert httpx.post(f"http://{address}{path}", timeout=TIMEOUT_S, trust_env=False).status_code == 405
    assert "script-src 'sha256-" in get(f"http://{address}/").headers["Content-Security-Policy"]


def test_browsers_keep_no_page_and_no_state(address: str) -> None:
    found = [get(f"http://{address}{path}").headers.get("Cache-Control") for path in ("/", "/api/v1/state")]
    assert found == ["no-store"] * 2


@pytest.mark.slow
def test_without_a_scheduler_it_says_so_and_since_when(tmp_path: Path) -> None:
    base = f"http://127.0.0.1:{free_port()}"
    argv = [sys.executable, "-m", "rose.cli", "sched", "dashboard", "--http", base.removeprefix("http://")]
    with ServerProcess([*argv, "--channel", f"unix:{tmp_path}"], "page", tmp_path / "log").start() as server:
        wait_answers(f"{base}/")
        state = get(f"{base}/api/v1/state").json()
        assert (state["is_reachable"], state["cluster"], state["answered_at"]) == (False, None, None)
        assert state["absent_since"] <= state["now"]
        wait_until(lambda: "no scheduler" in get(f"{base}/api/v1/state").json()["error"], "the reason")
        text = get(f"{base}/metrics").text
        assert "rose_sched_up 0.0" in text and "rose_sched_jobs" not in text
        taken = subprocess.run([*argv], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert taken.returncode == 2 and taken.stderr.count("\n") >= 1 and "can't be used" in taken.stderr
        assert server.is_alive()


def test_serve_refuses_an_address_before_anything_starts(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "rose.jobs.serve",
        "--channel",
        f"unix:{tmp_path}",
        "--folder",
        str(tmp_path),
        "--insecure",
    ]
    for http, said in {
        "localhost:http": "1 to 65535",
        "no.such.host.invalid:8200": "can't be used",
    }.items():
        ended = subprocess.run(
            [*argv, "--http", http], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert ended.returncode == 2 and said in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr
