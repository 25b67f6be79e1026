"""Asking a dashboard over HTTP."""

from typing import Any

import httpx
from served_cluster import wait_until

TIMEOUT_S = 60.0


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=TIMEOUT_S, trust_env=False)


def answers(url: str) -> bool:
    try:
        return get(url).status_code == 200
    except httpx.TransportError:  # not listening yet
        return False


def wait_answers(url: str) -> None:
    wait_until(lambda: answers(url), f"an answer from {url}")


def cluster_of(base: str) -> dict[str, Any]:
    """What the dashboard at this address says of a scheduler that it reaches."""
    state = get(f"{base}/api/v1/state").json()
    assert state["is_reachable"], state["error"]
    found: dict[str, Any] = state["cluster"]
    return found
