"""Gives the GPU back in the middle of a rollout step, between two layers, when serving has work.

The scheduler starts and ends the steps, and the worker in the same process asks ahead of each attention
layer. A request that comes to an idle GPU then waits for a part of a layer, not of a step. Only gate mode
``idle`` does this, because in the others serving has lent the time of the whole step. Steps are not
interrupted with several ranks, whose workers are other processes, or in a captured CUDA graph, in which no
layer asks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch

from rose.admission.rollout_side import MAX_LAYERS_AHEAD, Resumed, RolloutSide

MIN_LEFT_S = 0.001
ATTENTION_CALLS = ("forward", "forward_mha", "forward_mqa")
"""The methods of vLLM's attention implementations that compute a layer."""


class StepInterrupt:
    """Pauses the steps of one engine core, in that core's thread."""

    def __init__(self, side: RolloutSide) -> None:
        self._side = side
        self._has_queue = torch.cuda.is_available()
        self._ends_s: float | None = None
        self._queued: deque[torch.cuda.Event] = deque()
        self._paused_s = 0.0

    def begin(self, step_s: float) -> None:
        """Notes that a step has its grant, and its predicted seconds (error included)."""
        self._ends_s = time.monotonic() + step_s

    def end(self) -> float:
        """Notes that the step is over; returns the seconds for which it was paused."""
        self._ends_s = None
        paused_s, self._paused_s = self._paused_s, 0.0
        return paused_s

    def ask(self) -> None:
        """Pauses the step for as long as serving wants the GPU. Called ahead of a layer."""
        if self._ends_s is None:
            return
        if self._has_queue:
            self._bound_queue()
        if not self._side.is_called():
            return
        if self._has_queue:
            torch.cuda.synchronize()
        paused_at_s = time.monotonic()
        left_s = max(MIN_LEFT_S, self._ends_s - paused_at_s)
        self._side.pause()
        while (resumed := self._side.try_resume(left_s, time.monotonic() - paused_at_s)) is Resumed.NOT:
            self._side.wait_grant()
        resumed_at_s = time.monotonic()
        self._paused_s += resumed_at_s - paused_at_s
        # With a grant the step goes on to its end: serving waits for it.
        self._ends_s = resumed_at_s + left_s if resumed is Resumed.WHILE_IDLE else None

    def _bound_queue(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._queued.append(event)
        if len(self._queued) > MAX_LAYERS_AHEAD:
            self._queued.popleft().synchronize()


_current: StepInterrupt | None = None


def install(interrupt: StepInterrupt) -> None:
    """Has this process's layers ask ``interrupt``."""
    global _current
    _current = interrupt


def make_interruptible(layers: Iterable[Any]) -> None:
    """Makes vLLM's attention layers ask ahead of their computation."""
    for layer in layers:
        implementation = getattr(layer, "impl", None)
        for name in ATTENTION_CALLS:
            if (call := getattr(implementation, name, None)) is not None:
                setattr(implementation, name, _asking_first(call))


def _asking_first(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def asking(*args: Any, **kwargs: Any) -> Any:
        if _current is not None:
            _current.ask()
        return call(*args, **kwargs)

    return asking
