"""Waiting for what another process does."""

import time
from collections.abc import Callable

DEADLINE_S = 300


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the subscriber did not get there"
        time.sleep(0.02)
