"""A dashboard with a key: who reads it, and where it may listen then."""

import sys
from collections.abc import Iterator

import httpx
import pytest
from http_calls import TIMEOUT_S
from served_cluster import wait_until

from rose.node.processes import ServerProcess
from rose.ports import free_port

KEY = "kéy:of the page"
PATHS = ("/", "/api/v1/state", "/metrics")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard that listens everywhere, with a key."""
    folder, port = tmp_path_factory.mktemp("page"), free_port()
    argv = [sys.executable, "-m", "rose.cli", "sched", "dashboard", "--http", f"0.0.0.0:{port}"]
    process = ServerProcess(
        [*argv, "--channel", f"unix:{folder}"], "page", folder / "log", env={"ROSE_DASHBOARD_KEY": KEY}
    )
    with process.start():
        base = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.is_alive() and status(base) is not None, "the dashboard")
        yield base


def status(url: str, auth: tuple[str, str] | None = None, **headers: str | bytes) -> int | None:
    """What a request is answered; None: nothing listens yet."""
    given = [
        (name.encode(), each.encode() if isinstance(each, str) else each) for name, each in headers.items()
    ]
    basic = httpx.BasicAuth(*auth) if auth is not None else None
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        try:
            return client.get(url, headers=given, auth=basic).status_code
        except httpx.TransportError:
            return None


@pytest.mark.parametrize("path", PATHS)
def test_nobody_reads_it_without_the_key(url: str, path: str) -> None:
    assert status(url + path) == 401
    assert status(url + path, auth=("rose", "another")) == 401
    for wrong in ("Bearer", "Bearer another", "Basic", "Basic !!!", "Basic a2V5", KEY, b"Bearer \xff\xfe"):
        assert status(url + path, Authorization=wrong) == 401


@pytest.mark.parametrize("path", PATHS)
def test_a_browser_asks_for_the_key_and_programs_send_it(url: str, path: str) -> None:
    asked = httpx.get(url + path, timeout=TIMEOUT_S, trust_env=False)
    assert asked.headers["WWW-Authenticate"].startswith("Basic ")
    assert status(url + path, auth=("anybody", KEY)) == 200
    assert status(url + path, Authorization=f"Bearer {KEY}") == 200
