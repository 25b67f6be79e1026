"""Asking a dashboard over HTTP."""

from typing import Any

import httpx
from served_cluster import wait_until

TIMEOUT_S = 300.0


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
    """What the dashboard at this address says of a scheduler, once that has answered it in time."""
    told: list[dict[str, Any]] = []

    def is_reachable() -> bool:
        told.append(get(f"{base}/api/v1/state").json())
        return bool(told[-1]["is_reachable"])

    wait_until(is_reachable, "the scheduler's answer to the dashboard")
    found: dict[str, Any] = told[-1]["cluster"]
    return found
