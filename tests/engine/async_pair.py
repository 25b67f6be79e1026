"""A serving and a rollout engine with async scheduling that give each other the GPU, each on a late device.

Each function runs in a process of its own. One engine always has work. The other one wants the GPU now and
then, for one request.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from async_runs import _gated
from engine_runs import Prompts, num_changes, tenant_of
from forked_engines import Reply
from late_device import LateDevice, use_late_device

from rose.admission.board import BoardWord, announce_arrival
from rose.types import Role

LEAST_PAUSE_S, MOST_PAUSE_S = 0.03, 0.1
SHORT = 2
"""The tokens of a request that wants the GPU now and then."""

Step = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request's wish for the GPU, and what became of it."""

    asked_s: float
    granted_s: float
    """When this engine had the claim on the GPU."""
    began_s: float
    """When its first step began on its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one of the two engines did once both were ready."""

    replies: list[list[Reply]]
    steps: list[Step]
    most_in_flight: int
    num_overruns: int
    """Times that serving waited no longer for a rollout step."""
    num_grants: int
    """Grants that serving has offered."""
    num_moves: int
    asked: list[Asked]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What two engines that give each other the GPU have in common, and the events by which they meet."""

    model: Path
    pool: str
    tpot_target_ms: float | None = None
    ready: Event
    begin: Event
    stop: Event
    done: Event


def work_on(pair: Pair, role: Role, prompts: Prompts, max_tokens: int) -> Part:
    """Answers all prompts at once, over and over, from ``begin`` until told to stop."""
    try:
        run = _Run(pair, role, prompts, max_tokens)
        pair.ready.set()
        run.driver.step_until(pair.begin.is_set, "the other engine", 1200.0)
        run.begin()
        while not pair.stop.is_set():
            run.replies.append(run.driver.answer(prompts, max_tokens))
        return run.part()
    finally:
        pair.done.set()


def ask_now_and_then(
    pair: Pair, role: Role, prompts: Prompts, max_tokens: int, num_asks: int, seed: int
) -> Part:
    """Warms up with ``max_tokens``. Asks for a few tokens after each pause, beside the engine that has work;
    then tells it to stop, and stays until it has: rollouts wait for a serving engine that has died."""
    try:
        pair.ready.wait()
        run = _Run(pair, role, prompts, max_tokens)
        run.begin()
        pair.begin.set()
        rng = random.Random(seed)
        for index in range(num_asks):
            time.sleep(rng.uniform(LEAST_PAUSE_S, MOST_PAUSE_S))
            run.ask(prompts[index % len(prompts)])
        part = run.part()
    finally:
        pair.stop.set()
    run.driver.step_until(pair.done.is_set, "the other engine's last answers")
    return part


class _Run:
    def __init__(self, pair: Pair, role: Role, prompts: Prompts, max_tokens: int) -> None:
        self._device = use_late_device()
        self.driver = _gated(
            pair.model, role, pair.pool, prompts, max_tokens, tpot_target_ms=pair.tpot_target_ms
        )
        self._role = role
        self._words = tenant_of(self.driver).client.board_words
        self._granted_s = 0.0
        side = self.driver.scheduler._side
        name = "begin_step" if role is Role.SERVING else "try_begin"
        setattr(side, name, self._noting(getattr(side, name)))
        self.replies: list[list[Reply]] = []
        self._asked: list[Asked] = []
        self.begin()

    def begin(self) -> None:
        """Forgets the warm-up."""
        self._moves_before = num_changes(tenant_of(self.driver))
        self._device.steps.clear()
        self._device.most_in_flight = 0

    def _noting(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Notes when the claim on the GPU was taken first since a request asked for it."""

        def noting(*args: Any) -> Any:
            taken = take(*args)
            if taken is not False and self._granted_s == 0.0:
                self._granted_s = time.monotonic()
            return taken

        return noting

    def ask(self, prompt: Sequence[int]) -> None:
        """Asks for a few tokens; a serving engine is told by its API server that a request comes."""
        self._granted_s, num_before = 0.0, len(LateDevice.steps)
        asked_s = time.monotonic()
        if self._role is Role.SERVING:
            announce_arrival(self._words)
        self.replies.append(self.driver.answer([prompt], SHORT))
        began_s = LateDevice.steps[num_before][0]
        self._asked.append(Asked(asked_s=asked_s, granted_s=self._granted_s, began_s=began_s))

    def part(self) -> Part:
        tenant = tenant_of(self.driver)
        tenant.pool.check_integrity()
        return Part(
            replies=self.replies,
            steps=list(self._device.steps),
            most_in_flight=self._device.most_in_flight,
            num_overruns=self._words.load(BoardWord.S_OVERRUNS),
            num_grants=self._words.load(BoardWord.S_YIELDS),
            num_moves=num_changes(tenant) - self._moves_before,
            asked=self._asked,
        )


def num_overlaps(one: Sequence[Step], other: Sequence[Step]) -> int:
    """Returns how many steps of two engines computed at the same time."""
    steps = sorted([*((step, 0) for step in one), *((step, 1) for step in other)])
    return sum(
        engine != next_engine and end_s > begin_s
        for ((_, end_s), engine), ((begin_s, _), next_engine) in pairwise(steps)
    )


def seconds_beyond_step(wish: Asked, others: Sequence[Step]) -> float:
    """Returns how long after the end of the other engine's step that ran at the wish the GPU was there."""
    running = [end_s for begin_s, end_s in others if begin_s <= wish.asked_s < end_s]
    return wish.granted_s - max([wish.asked_s, *running])


def steps_after_wish(wish: Asked, others: Sequence[Step]) -> list[Step]:
    """Returns the steps that the other engine began between the wish and the grant of the GPU."""
    return [step for step in others if wish.asked_s < step[0] < wish.granted_s]
