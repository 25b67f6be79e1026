"""Traces one streamed turn through a router in this process: which of its modules call which.

Counts calls between the router's own modules, on behalf of the turn alone; what runs beside it (heartbeats,
other tasks) is left out. A called module counts once for each caller, so the answer's length changes nothing.
"""

import asyncio
import sys
from collections import defaultdict
from pathlib import PurePosixPath
from types import FrameType

import httpx

from rose.scheduler.rollout.http.command import RunningRouter
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec

ROOM = "scheduler/rollout/"
"""The folder of the router's modules."""
HANDLER = "http/service.py"
"""The module that takes a client's request: a stack that holds it belongs to the turn."""
START_POLLS, POLL_S = 200, 0.05


class Trip:
    """A function for sys.setprofile that notes the calls of a turn."""

    def __init__(self) -> None:
        self.called: dict[str, set[str]] = defaultdict(set)
        """The modules that each module called, and from which control came back to it."""
        self.back: set[tuple[str, str]] = set()
        """(caller, called) where the called module was waiting further up the stack."""
        self._seen: set[FrameType] = set()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        # A coroutine that goes on is reported as a call as well.
        if event != "call" or (module := _module(frame)) is None or frame in self._seen:
            return
        self._seen.add(frame)
        above = _modules_above(frame)
        if HANDLER in above and above[0] != module:
            self.called[above[0]].add(module)
            if module in above:
                self.back.add((above[0], module))

    def most_returns(self) -> tuple[str, int]:
        """Returns the module to which control came back from the most others, and from how many."""
        module = max(self.called, key=lambda each: len(self.called[each]))
        return module, len(self.called[module])


def _module(frame: FrameType) -> str | None:
    _, room, module = frame.f_code.co_filename.rpartition(ROOM)
    return str(PurePosixPath(module)) if room else None


def _modules_above(frame: FrameType) -> list[str]:
    found: list[str] = []
    above = frame.f_back
    while above is not None:
        if (module := _module(above)) is not None:
            found.append(module)
        above = above.f_back
    return found


async def trace_turn(worker: str) -> Trip:
    """Sends two turns to a router before the worker at this URL, and traces the second one."""
    trip = Trip()
    config = RouterConfig(workers=(WorkerSpec(url=worker),), port=0)
    async with RunningRouter(config) as router, httpx.AsyncClient(trust_env=False) as client:
        for _ in range(START_POLLS):
            if (await client.get(f"{router.url}/health")).is_success:
                break
            await asyncio.sleep(POLL_S)
        await _send_turn(client, router.url)
        sys.setprofile(trip)
        try:
            await _send_turn(client, router.url)
        finally:
            sys.setprofile(None)
    return trip


async def _send_turn(client: httpx.AsyncClient, url: str) -> None:
    body = {"model": "stub", "prompt": list(range(32)), "max_tokens": 64, "stream": True}
    answer = await client.post(f"{url}/v1/completions", json=body, headers={"X-Session-ID": "house"})
    answer.raise_for_status()
