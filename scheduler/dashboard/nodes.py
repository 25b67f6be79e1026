"""What the engines of shared nodes report. Each serves, and trainers and rollouts compute in its gaps.

Owns what one engine is asked, its last answers, and since when there are none. Shares are those of the last
seconds.
"""

import argparse
import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rose.errors import ConfigError
from rose.http import checked_url, http_client
from rose.messages import WorkerStatus
from rose.scheduler.dashboard.question import Question

REFRESH_S = 1.0
RETRY_S = 2.0
ANSWER_S = 2.0
"""An engine that takes longer is shown as absent; the question stays on its way."""
WINDOW_S = 10.0
"""Shares of shorter times jump, because a step of training may take a second."""
_HINTS = {401: "; set ROSE_KEY", 403: "; set ROSE_KEY", 404: ": not a ROSE engine"}


def add_node_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that names engines."""
    parser.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="URL",
        help="an engine of a node that serves and fine-tunes, asked with ROSE_KEY; may be repeated",
    )


def checked_node(url: str) -> str:
    """Returns an engine's URL without a last slash. Raises: ConfigError for what is no URL."""
    try:
        return checked_url(url)
    except ValueError as error:
        raise ConfigError(
            f"--node {url}: expected the engine's URL with its host and port, such as http://10.0.0.2:8000"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One answer of an engine. guests: what its metrics say of who computes in its gaps, by name; of several
    GPUs, their mean."""

    taken_s: float
    status: WorkerStatus
    guests: Mapping[str, float]


class NodeFeed:
    """One engine. One event loop, and a thread while a question is on its way."""

    def __init__(self, url: str, key: str | None, ca: Path | None) -> None:
        """Raises: ConfigError for what is no URL."""
        self.url = checked_node(url)
        self._client = http_client(key=key, timeout=ANSWER_S, ca=ca)
        self._readings = deque[Reading]()
        self._question = Question(self._ask, ANSWER_S)
        self._answered_at: float | None = None
        self._error: str | None = None

    async def state(self) -> dict[str, Any]:
        """Returns the last answer, after asking again if it is time."""
        try:
            if (asked := await self._question.settled()) is not None:
                self._settle(asked)
        except TimeoutError as error:
            self._error = str(error)
        return {
            "url": self.url,
            "is_reachable": self._error is None and self._answered_at is not None,
            "answered_at": self._answered_at,
            "error": self._error,
            "engine": node_view(self._readings) if self._readings else None,
        }

    def close(self) -> None:
        self._client.close()

    def _settle(self, asked: asyncio.Task[Reading]) -> None:
        """Takes what has become of the question."""
        self._question.wait(RETRY_S)
        try:
            reading = asked.result()
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            self._error = f"status {code}{_HINTS.get(code, '')}"
        except httpx.HTTPError as error:
            self._error = str(error) or type(error).__name__
        except (ValueError, LookupError):
            self._error = "its answer is not that of a ROSE engine"
        else:
            if self._readings and self._readings[-1].status.activated_at_s != reading.status.activated_at_s:
                self._readings.clear()  # another engine, or one that has been started again
            self._readings.append(reading)
            while len(self._readings) > 2 and reading.taken_s - self._readings[1].taken_s >= WINDOW_S:
                self._readings.popleft()
            self._question.wait(REFRESH_S)
            self._answered_at, self._error = time.time(), None

    def _ask(self) -> Reading:
        status = self._client.get(f"{self.url}/rose/v1/status").raise_for_status()
        metrics = self._client.get(f"{self.url}/metrics").raise_for_status()
        return Reading(
            taken_s=time.monotonic(),
            status=WorkerStatus.model_validate_json(status.content),
            guests=_guests(metrics.text),
        )


def node_view(readings: "deque[Reading]") -> dict[str, Any]:
    """Returns what a person wants to see of an engine; None where it is not known. Pure."""
    now, before = readings[-1], readings[0]
    status, wall_s = now.status, now.taken_s - before.taken_s

    def rate(value: float | None, earlier: float | None) -> float | None:
        """Returns how fast a counter grew, in units per second; None if it was restarted."""
        if value is None or earlier is None or wall_s <= 0 or value < earlier:
            return None
        return (value - earlier) / wall_s

    def guest_rate(name: str) -> float | None:
        return rate(now.guests.get(name), before.guests.get(name))

    return {
        "model": status.model,
        "engine_id": status.engine_id,
        "role": status.role.value,
        "weight_version": status.weight_version,
        "is_updating": status.is_updating,
        "num_in_place": status.weights_in_place,
        "num_whole": status.weights_whole,
        "num_running": status.num_running,
        "num_waiting": status.num_waiting,
        "gate": status.gate.mode.value,
        "serving_share": rate(status.serving_busy_s, before.status.serving_busy_s),
        "guest_share": guest_rate("rose_harvested_seconds_total"),
        "guest_steps_per_s": guest_rate("admitted"),
        "guest_s": now.guests.get("rose_harvested_seconds_total"),
        "num_pauses": now.guests.get("rose_pauses_total"),
        "num_evictions": now.guests.get("rose_evictions_total"),
    }


def _guests(text: str) -> dict[str, float]:
    """Reads ROSE's part of an engine's metrics. Steps that the gate admitted are named ``admitted``."""
    own = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("rose_"))
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(own):
        for sample in family.samples:
            is_decision = sample.name == "rose_gate_decisions_total"
            name = sample.labels["reason"] if is_decision else sample.name
            found.setdefault(name, []).append(sample.value)
    return {name: sum(values) / len(values) for name, values in found.items()}
