"""What the forked engines with async scheduling do, on a late device. Each function runs in a process of its
own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import async_on_cpu  # noqa: F401
from engine_runs import Moves, Prompts, _cut, answer_over_cuts, serve_bursts, tenant_of
from forked_engines import Driver, Reply, make_engine
from late_device import LateDevice, use_late_device
from preloaded import ASYNC, STAGES

from rose._shm import Words
from rose.admission.board import BoardWord
from rose.admission.gate import ServingView
from rose.admission.rollout_side import RolloutSide
from rose.engine.scheduling.scheduler import RoseScheduler
from rose.types import GateMode

WARM_UP_ROUNDS = 2
SLO = {"slo_ttft_ms": 8000.0, "slo_tpot_ms": 2000.0}
"""Loose, so that there is slack on a busy machine."""
PATIENT_S = 1200.0
ROLLOUT_STEP_S = 0.003
HANDOVER_S = 2.0
"""How long serving waits for a rollout engine's thread, which may not run at once on a busy machine."""
PATIENT_TARGET_MS = 600_000.0
"""A TPOT target that leaves slack however long serving's steps take on a busy machine."""
LEAD_STEPS = 4
"""How many rollout steps there may be for each of serving's. The slack would last for minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateMoves:
    moves: Moves
    most_in_flight: int
    num_waits: int
    """Times that unmapping waited for the device."""


def answer_over_cuts_late(
    model: Path,
    pool: str,
    prompts: Prompts,
    max_tokens: int,
    num_rounds: int,
    *,
    is_fenced: bool = True,
    **args: Any,
) -> LateMoves:
    """Half of the slabs leave while two steps are in flight, that is while the older one may use them."""
    device = use_late_device(is_fenced=is_fenced)
    moves = answer_over_cuts(model, pool, prompts, max_tokens, num_rounds, len(prompts), **args)
    return LateMoves(moves=moves, most_in_flight=device.most_in_flight, num_waits=device.num_waits)


class Ranks:
    """The steps that an engine core of several ranks has in flight."""

    most_in_flight = 0
    num_in_flight = 0
    """Steps whose output is not there yet."""


def use_ranks(layers: str = "") -> type[Ranks]:
    """Counts the steps in flight of an engine whose ranks are processes of their own, and compute when they
    can. With tensor-parallel ranks, scheduling is async; vLLM turns it off with a pipeline's and Model Runner
    V1. ``layers``: how many a pipeline's stages have, with commas."""
    os.environ.update(ASYNC)
    if layers:
        os.environ[STAGES] = layers
    bound, update = RoseScheduler._bound_in_flight, RoseScheduler.update_from_output

    def count(scheduler: Any) -> None:
        Ranks.num_in_flight = sum(step.total_num_scheduled_tokens > 0 for step in scheduler._in_flight)
        Ranks.most_in_flight = max(Ranks.most_in_flight, Ranks.num_in_flight)

    def bound_counted(scheduler: Any) -> None:
        count(scheduler)
        bound(scheduler)

    def update_counted(scheduler: Any, step: Any, output: Any) -> Any:
        outputs = update(scheduler, step, output)
        count(scheduler)
        return outputs

    RoseScheduler._bound_in_flight = bound_counted  # type: ignore[method-assign,assignment]
    RoseScheduler.update_from_output = update_counted  # type: ignore[method-assign,assignment]
    return Ranks


def answer_over_cuts_on_ranks(
    model: Path,
    pool: str,
    prompts: Prompts,
    max_tokens: int,
    num_rounds: int,
    layers: str = "",
    **args: Any,
) -> LateMoves:
    """The same with several ranks. ``layers``: of a pipeline's stages."""
    ranks = use_ranks(layers)
    moves = answer_over_cuts(model, pool, prompts, max_tokens, num_rounds, len(prompts), **args)
    return LateMoves(moves=moves, most_in_flight=ranks.most_in_flight, num_waits=0)


def serve_bursts_late(**given: Any) -> tuple[list[list[int]], int]:
    """Returns the answers of a serving engine, and the most steps that it had in flight."""
    device = use_late_device()
    return serve_bursts(**given), device.most_in_flight


def serve_bursts_in_stages(layers: str, **given: Any) -> list[list[int]]:
    """Returns the answers of a serving engine whose ranks are a pipeline's stages with so many layers."""
    use_ranks(layers)
    return serve_bursts(**given)


def answer_until_stops(
    model: Path, pool: str, prompts: Prompts, max_tokens: int, stops: Sequence[int]
) -> list[Reply]:
    """Each answer ends at its stop token, with a step behind it in flight; then the freed blocks leave."""
    device = use_late_device()
    driver = Driver(make_engine(model, {"role": "rollout", "pool": pool, "stall_s": PATIENT_S}))
    replies = driver.wait(driver.ask(prompts, max_tokens, stops))
    _cut(driver, 1)
    driver.step_until(lambda: tenant_of(driver).num_owned == 1, "all slabs given back")
    tenant_of(driver).pool.check_integrity()
    assert device.most_in_flight == 2
    return replies


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What a serving engine and a rollout engine beside it did."""

    replies: list[Reply]
    alone_in_flight: int
    """The most of serving's steps in flight while no rollout wanted the GPU."""
    num_serving_steps: int
    num_rollout_steps: int
    """Between two of serving's steps."""
    num_overlaps: int


def offer_turns(
    model: Path,
    pool: str,
    prompts: Prompts,
    max_tokens: int,
    speculative: dict[str, Any] | None = None,
) -> Turns:
    """A serving engine with slack to spend, first alone, then beside an engine that wants LEAD_STEPS for each
    of serving's steps."""
    return _offer_turns(use_late_device(), model, pool, prompts, max_tokens, speculative_config=speculative)


def offer_turns_of_ranks(layers: str, **given: Any) -> Turns:
    """The same with several ranks. ``layers``: of a pipeline's stages."""
    return _offer_turns(use_ranks(layers), **given)


def _offer_turns(
    device: type[LateDevice] | type[Ranks],
    model: Path,
    pool: str,
    prompts: Prompts,
    max_tokens: int,
    **args: Any,
) -> Turns:
    driver = _gated(model, "serving", pool, prompts, max_tokens, tpot_target_ms=PATIENT_TARGET_MS, **args)
    patient = replace(driver.scheduler._gate.settings, handover_s=HANDOVER_S)
    driver.scheduler.set_gate(patient)
    device.most_in_flight = 0
    driver.answer(prompts, max_tokens)
    alone = device.most_in_flight
    words = tenant_of(driver).client.board_words
    with _Rollouts(words, device) as rollouts:
        replies = driver.answer(prompts, max_tokens)
        num_serving_steps = rollouts.num_serving_steps
    return Turns(
        replies=replies,
        alone_in_flight=alone,
        num_serving_steps=num_serving_steps,
        num_rollout_steps=rollouts.num_steps,
        num_overlaps=rollouts.num_overlaps,
    )


def _gated(
    model: Path,
    role: str,
    pool: str,
    prompts: Prompts,
    max_tokens: int,
    mode: GateMode = GateMode.DUAL,
    tpot_target_ms: float | None = None,
    **args: Any,
) -> Driver:
    """Returns an engine that has learned how long its steps take, and then shuts its gate."""
    driver = Driver(make_engine(model, {"role": role, "pool": pool, "stall_s": PATIENT_S, **SLO}, **args))
    for round_number in range(WARM_UP_ROUNDS):
        driver.answer(prompts[: len(prompts) - round_number], max_tokens)
    scheduler = driver.scheduler
    assert scheduler.recorder.is_profiled
    scheduler.set_gate(scheduler.rose.gate_settings(mode, tpot_target_ms))
    return driver


class _Rollouts:
    """A context manager: a rollout engine's side of the board, whose steps only look at serving's device."""

    def __init__(self, words: Words, device: type[LateDevice] | type[Ranks]) -> None:
        self._device = device
        self._side = RolloutSide(words)
        self._words = words
        self._steps_before = words.load(BoardWord.S_STEPS)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_steps = self.num_overlaps = 0

    @property
    def num_serving_steps(self) -> int:
        return self._words.load(BoardWord.S_STEPS) - self._steps_before

    def _run(self) -> None:
        while not self._closing.is_set():
            if not self._want():
                time.sleep(ROLLOUT_STEP_S / 8)
            elif self._side.wait_grant():
                self._step(self._side.view())

    def _want(self) -> bool:
        wants = self.num_steps < LEAD_STEPS * (1 + self.num_serving_steps)
        self._side.set_want(wants, ROLLOUT_STEP_S)
        return wants

    def _step(self, view: ServingView) -> None:
        # The predicted end is late, so that serving waits for a step that a busy machine holds up.
        if view.may_start and self._side.try_begin(time.monotonic() + HANDOVER_S, view):
            until_s = time.monotonic() + ROLLOUT_STEP_S
            while time.monotonic() < until_s:
                self.num_overlaps += self._device.num_in_flight > 0
                time.sleep(ROLLOUT_STEP_S / 8)
            self.num_steps += view.has_work
            self._want()
            self._side.end_step(1)

    def __enter__(self) -> _Rollouts:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._closing.set()
        self._thread.join()
        self._side.detach()
