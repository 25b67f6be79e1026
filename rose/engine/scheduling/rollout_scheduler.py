"""The rollout engine's scheduler: steps only inside serving's slack, and gives memory back when told.

Owns when a rollout step is asked for, taken or declined, and ends requests that stand still. Promises no
step without the board's grant while the gate is on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from rose.admission.gate import (
    GateDecision,
    GatePolicy,
    GateReason,
    GateSettings,
    RolloutCandidate,
    ServingView,
)
from rose.admission.rollout_side import RolloutSide
from rose.admission.stall import StallTracker
from rose.engine.memory.rollout_memory import RolloutMemory
from rose.engine.scheduling.scheduler import RoseScheduler
from rose.engine.status import Field
from rose.types import GateMode, StopReason

STARVED_RETRY_S = 0.05
"""Pause between two turns asked for while nothing that waits gets memory."""
STARVED_WAIT_S = 0.01
"""Longest sleep of the engine's loop meanwhile; a change of the ledger ends it."""
PATIENT_WAIT_S = 0.1
"""The longest time without a grant until the engine's loop runs once all the same."""
MAX_TRIES = 3
"""Serving may publish between our look and our claim; after a few losses, return to the engine's loop."""


class RolloutScheduler(RoseScheduler):
    """Set by ``role: rollout``. Without a pool it is a dedicated engine: no gate, no lease, no cut."""

    _side: RolloutSide | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stalls = StallTracker(self.rose.stall_s)
        self._rl_step = 0
        self._memory: RolloutMemory | None = None
        if self.tenant is not None:
            policy = self.rose.budget_policy(self.tenant.client)
            self._memory = RolloutMemory(self.tenant, policy, self._reclaim)
            self._side = RolloutSide(self.tenant.client.board_words)
        self._is_stepping = False
        self._starved: tuple[int, ...] | None = None
        """What _memory_state() was when a grant went unused: asking again before it changes would only cost
        serving its slack."""
        self._starved_until_s = 0.0
        self._waits_since_s = time.monotonic()

    def set_gate(self, gate: GateSettings) -> None:
        super().set_gate(gate)
        self._gate = GatePolicy(gate)
        if gate.mode is GateMode.OFF:
            self._want_nothing()

    def set_pause_state(self, pause_state: PauseState) -> None:
        """A paused request stands still on purpose: it waits for new weights, or the engine for its own."""
        super().set_pause_state(pause_state)
        if pause_state is PauseState.UNPAUSED:
            self._stalls.activate(time.monotonic())
        else:
            self._stalls.deactivate(time.monotonic())
            self._want_nothing()

    def _want_nothing(self) -> None:
        """Nobody asks for turns from now on: serving would offer them all the same, and wait for each."""
        if self._side is not None:
            self._side.set_want(False)

    # Ahead of the step ----------------------------------------------------------------------------------

    def before_step(self, now: float) -> None:
        memory = self._memory
        wanted_step = self.page.get(Field.RL_STEP)
        if memory is not None and wanted_step != self._rl_step:
            self._rl_step = wanted_step
            memory.begin_rl_step(wanted_step)
        if self._is_wanted_inactive:
            self._stand_down()
            return
        self.page.put(Field.IS_INACTIVE, 0)
        self._end_stalled(now)
        if memory is not None:
            unfinished = (request for request in self.requests.values() if not request.is_finished())
            self.wake_at(memory.tick(now, self.running, self.waiting_requests(), unfinished))

    @property
    def _is_wanted_inactive(self) -> bool:
        return self.page.get(Field.WANTED_INACTIVE) == 1

    def _stand_down(self) -> None:
        """Hold nothing: also a request that was on its way while the engine was told so ends at once."""
        if self.requests:
            self.end_requests(list(self.requests), StopReason.DEACTIVATED)
        if self._memory is not None:
            self._memory.give_everything_back()
            self.wake_at(None)
        self.page.put(Field.IS_INACTIVE, 1)

    def has_requests(self) -> bool:
        # vLLM pauses a sleeping engine, and a paused one does not step for a request that waits.
        return super().has_requests() or (self._is_wanted_inactive and bool(self.requests))

    def _end_stalled(self, now: float) -> None:
        # A request that could have a slot now waits for compute or memory, not for a slot.
        self._stalls.observe([r.request_id for r in [*self.running, *self.waiting_requests()]], now)
        stalled = self._stalls.stalled(now)
        if stalled:
            ended = self.end_requests(stalled, StopReason.STALLED)
            self.page.count(Field.STALLED_REQUESTS, len(ended))
            if self._side is not None:
                self._side.count_stalls(len(ended))

    def _reclaim(self, request_ids: Iterable[str]) -> None:
        ended = self.end_requests(request_ids, StopReason.RECLAIMED)
        self.page.count(Field.RECLAIMED_REQUESTS, len(ended))

    # The gate ---------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._side is None or self._gate.settings.mode is GateMode.OFF:
            return super().schedule(throttle_prefills)
        limit = self._ask_for_grant(self._side)
        most, self.max_num_scheduled_tokens = self.max_num_scheduled_tokens, limit
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = most
        if self._is_stepping and output.total_num_scheduled_tokens == 0:
            self._end_grant(0)
            self._starved, self._starved_until_s = self._memory_state(), time.monotonic() + STARVED_RETRY_S
        return output

    def _ask_for_grant(self, side: RolloutSide) -> int:
        """Asks for the GPU; returns the step's token limit, 0 without a grant. May sleep: up to the board's
        20 ms once there is something else to do."""
        candidate = self._candidate()
        side.set_want(candidate.num_decodes + candidate.prefill_tokens_waiting > 0, self._shortest_step_s())
        for attempt in range(MAX_TRIES):
            view = side.view()
            decision = self._decide(candidate, view)
            if decision.is_admitted and side.try_begin(time.monotonic() + decision.step_s, view):
                self._is_stepping = True
                self.page.count(Field.ADMITTED_STEPS)
                self._be_fair(decision, candidate)
                return decision.max_tokens
            if not decision.is_admitted:
                side.decline(view, decision.reason)
                if decision.reason is GateReason.NOTHING_TO_RUN:
                    if self._is_starved():
                        self._wait_change(self._change_seq(), STARVED_WAIT_S)
                    return 0
            if attempt + 1 < MAX_TRIES and not self._await_grant(side):
                break
        self.page.count(Field.DECLINED_STEPS)
        return 0

    def _await_grant(self, side: RolloutSide) -> bool:
        """Sleeps until a step may be tried, or something else wants the engine's loop. A pass without a step
        takes every sequence out of the worker's batch, and its CPU time from whoever shares the core."""
        until_s = time.monotonic() + PATIENT_WAIT_S
        while not side.wait_grant():
            if not self.may_sleep_on() or time.monotonic() >= until_s:
                return False
        return True

    def _be_fair(self, decision: GateDecision, candidate: RolloutCandidate) -> None:
        """Where not all decodes fit into the slack, let other sequences go first in the next step: vLLM
        serves its running list from the front."""
        if decision.max_seqs < candidate.num_decodes:
            self.running = self.running[decision.max_seqs :] + self.running[: decision.max_seqs]

    def _decide(self, candidate: RolloutCandidate, view: ServingView) -> GateDecision:
        return self._gate.decide(time.monotonic(), view, candidate, self.recorder.model)

    def _memory_state(self) -> tuple[int, ...]:
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return (free_blocks, *self.get_request_counts())

    def _is_starved(self) -> bool:
        return self._starved == self._memory_state() and time.monotonic() < self._starved_until_s

    def _candidate(self) -> RolloutCandidate:
        if self._is_starved() or self.pause_state is PauseState.PAUSED_ALL:
            return RolloutCandidate(prefill_tokens_waiting=0, num_decodes=0, context_tokens=0)
        prefill = decodes = context = 0
        for request in self.running:
            remaining = request.num_tokens - request.num_computed_tokens
            if remaining == 1 and request.num_output_tokens > 0:
                decodes += 1
                context += request.num_computed_tokens
            else:
                prefill += max(0, remaining)
        prefill += sum(request.num_tokens for request in self.waiting_requests())
        now = time.monotonic()
        if decodes + prefill == 0:
            self._waits_since_s = now
        return RolloutCandidate(
            prefill_tokens_waiting=min(prefill, self.max_num_scheduled_tokens),
            num_decodes=decodes,
            context_tokens=context,
            waited_s=now - self._waits_since_s,
        )

    def _shortest_step_s(self) -> float:
        return self.recorder.model.predict_safe(0, 1)

    # After the step -----------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self._is_stepping:
            self._end_grant(scheduler_output.total_num_scheduled_tokens)
        self._stalls.progress(scheduler_output.num_scheduled_tokens, time.monotonic())
        return super().update_from_output(scheduler_output, model_runner_output)

    def _end_grant(self, num_tokens: int) -> None:
        assert self._side is not None
        self._is_stepping = False
        self._waits_since_s = time.monotonic()
        self._side.end_step(num_tokens)

    def shutdown(self) -> None:
        if self._side is not None:
            self._side.detach()
        super().shutdown()
