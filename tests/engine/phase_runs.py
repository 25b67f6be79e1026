"""A prefiller and a decoder, each with a gate, an SLO of its phase and a rollout engine beside it in a pool
of its own. Each function runs in a process of its own."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from engine_runs import Prompts, tenant_of
from forked_engines import Driver, Reply
from prefill_decode_runs import Line, _decode, _nixl_engine, _prefill_until, num_transfers
from probes import SERVING_TOKENS, prompt

from rose.admission.board import BoardWord, to_ns, to_s
from rose.admission.harm import RequestDelay
from rose.engine.http.cores import EngineCore
from rose.messages import HarmStatus
from rose.types import Deployment, GateMode

SLO_MS = 2000.0
"""Loose, so that there is slack on a busy machine."""
IMPOSSIBLE_MS = 0.001
"""The SLO of the other phase: no step is as short."""
TPOT_TARGET_MS = 300.0
USEFUL_S = 0.1
"""Rollouts that can use as little slack have learned what their steps take."""
SPENDING_S = 120.0
"""For so long the decoder asks again, until both engines have spent slack."""
WARM_UP_ROUNDS = 12
STEP_TOKENS = 64
"""The prefiller's: a prompt takes it several steps, between which it may let rollouts go first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What an engine of one phase did, and what it said of its gate."""

    replies: list[list[Reply]]
    deployment: Deployment | None
    mode: GateMode
    """That of its gate in the end."""
    harm: HarmStatus
    longest_idle_step_s: float
    """The longest rollout step that it allowed while it was idle."""
    num_let_go_first: int
    """Rollout steps before which it had work of its own, and slack."""
    delays: list[RequestDelay]
    """The latencies of its requests since it spends slack."""


def prefill(model: Path, pool: str, line: Line, spends: Event, lets: Event, stop: Event) -> Phase:
    """Computes the prompts that are asked for, by its default gate until ``spends`` is set, and then by one
    that spends TTFT slack, until told to stop. ``lets``: see ``_Run``."""
    slo = {"slo_ttft_ms": SLO_MS, "slo_tpot_ms": IMPOSSIBLE_MS}
    run = _Run(_gated(model, pool, "kv_producer", step_tokens=STEP_TOKENS, **slo), lets)
    _prefill_until(lambda: spends.is_set() or stop.is_set(), run.driver, line)
    run.wait_for_rollouts()
    run.spend(GateMode.TTFT_ONLY, None)
    _prefill_until(stop.is_set, run.driver, line)
    return run.end([])


def decode(
    model: Path,
    pool: str,
    line: Line,
    spends: Event,
    lets: Sequence[Event],
    idle: Prompts,
    spending: Sequence[Prompts],
) -> Phase:
    """Decodes the prompts of ``idle`` by its default gate, and then those of ``spending`` by one that spends
    TPOT slack, all over again until both engines have spent some: ``lets``, of which the last is its own.
    ``spends`` is set when the second begins."""
    slo = {"slo_ttft_ms": IMPOSSIBLE_MS, "slo_tpot_ms": SLO_MS}
    run = _Run(_gated(model, pool, "kv_consumer", **slo), lets[-1])
    replies = [_decode(run.driver, [(line, idle)], SERVING_TOKENS)]
    assert num_transfers() == len(idle), "every prompt came from the prefiller"
    run.wait_for_rollouts()
    spends.set()
    run.spend(GateMode.DUAL, TPOT_TARGET_MS)
    until_s = time.monotonic() + SPENDING_S
    while time.monotonic() < until_s and not (len(replies) > 1 and all(event.is_set() for event in lets)):
        replies += [_decode(run.driver, [(line, prompts)], SERVING_TOKENS) for prompts in spending]
    return run.end(replies)


def _gated(model: Path, pool: str, role: str, **settings: Any) -> Driver:
    """Returns an engine with the default gate that has learned how long its steps take."""
    driver = _nixl_engine(model, pool, role, gate=None, **settings)
    for number in range(WARM_UP_ROUNDS):
        if driver.scheduler.recorder.is_profiled:
            break
        prompts = [prompt(f"{role}-{number}-{index}", 40 + 50 * index) for index in range(2 + number % 6)]
        driver.answer(prompts, SERVING_TOKENS)
    assert driver.scheduler.recorder.is_profiled
    return driver


class _Run:
    """One engine, and its place on the board."""

    def __init__(self, driver: Driver, lets: Event) -> None:
        """``lets`` is set once it has let rollouts go first."""
        self.driver = driver
        self._words = tenant_of(driver).client.board_words
        self._longest_idle_step_s = to_s(self._words.load(BoardWord.S_MAX_STEP))
        self.num_let_go_first, self._lets = 0, lets
        side = driver.scheduler._side
        side.offer_grants = partial(self._counting, side.offer_grants)

    def _counting(self, offer: Callable[..., float], *args: Any, **given: Any) -> float:
        before = self._words.load(BoardWord.R_STEPS)
        waited_s = offer(*args, **given)
        self.num_let_go_first += self._words.load(BoardWord.R_STEPS) - before
        if self.num_let_go_first:
            self._lets.set()
        return waited_s

    def wait_for_rollouts(self) -> None:
        """Returns once the idle engine has let rollouts step, and they have learned from it."""
        load, before = self._words.load, self._words.load(BoardWord.R_TOKENS)

        def have_learned() -> bool:
            return load(BoardWord.R_TOKENS) > before and load(BoardWord.R_MIN_STEP) < to_ns(USEFUL_S)

        self.driver.step_until(have_learned, "rollouts step")

    def spend(self, mode: GateMode, tpot_target_ms: float | None) -> None:
        assert self.num_let_go_first == 0
        scheduler = self.driver.scheduler
        self._num_before = len(scheduler._records.requests())
        scheduler.set_gate(scheduler.rose.gate_settings(mode, tpot_target_ms))

    def end(self, replies: list[list[Reply]]) -> Phase:
        """Leaves the board, so that rollouts do not take the engine for one that has died."""
        scheduler: Any = self.driver.scheduler
        tenant_of(self.driver).pool.check_integrity()
        core = EngineCore(scheduler.rose)
        assert core.watch is not None
        found = Phase(
            replies=replies,
            deployment=scheduler.rose.deployment,
            mode=core.gate_mode(),
            harm=core.watch.status(),
            longest_idle_step_s=self._longest_idle_step_s,
            num_let_go_first=self.num_let_go_first,
            delays=scheduler._records.requests()[self._num_before :],
        )
        scheduler.shutdown()
        return found
