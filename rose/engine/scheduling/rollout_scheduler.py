"""The rollout engine's scheduler. It steps only inside serving's slack, and gives memory back when told to.

Owns when a rollout step is tried, begun or declined, and which requests end because no step runs.
Promises that no step begins without a grant while the gate is on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

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
from rose.engine.memory.tenant import Tenant
from rose.engine.scheduling.continuation import count_as_output, take_over
from rose.engine.scheduling.interrupt import StepInterrupt, install
from rose.engine.scheduling.scheduler import RoseScheduler
from rose.engine.status import Field
from rose.types import GateMode, StopReason

STARVED_RETRY_S = 0.05
"""Pause between two requests for a grant while no waiting request can get memory."""
STARVED_WAIT_S = 0.01
"""Longest sleep of the engine's loop during that pause. A change of the ledger ends it."""
PATIENT_WAIT_S = 0.1
"""Longest wait for a grant after which the engine's loop runs once in any case."""
FORGET_SHARE = 0.5
"""The share of the stall timeout after which an engine without a step no longer goes by stale steps."""
MAX_TRIES = 3
"""Tries to claim the GPU per scheduling pass. A try fails if serving publishes between look and claim."""


class RolloutScheduler(RoseScheduler):
    """The scheduler of engines with ``role: rollout``. An engine without a pool is dedicated to rollouts: it
    has no gate, no leases and no cuts."""

    _side: RolloutSide | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stalls = StallTracker(self.rose.stall_s)
        self._refused: list[str] = []
        """The requests that serving's memory kept out of the last step."""
        self._rl_step = 0
        self._memory: RolloutMemory | None = None
        if self.tenant is not None:
            policy = self.rose.budget_policy(self.tenant.client)
            self._memory = RolloutMemory(self.tenant, policy, self._reclaim)
            self._side = RolloutSide(self.tenant.client.board_words)
            self._interrupt = StepInterrupt(self._side)
            install(self._interrupt)
        self._is_stepping = False
        self._starved: tuple[int, ...] | None = None
        """The memory state when a grant went unused. Asking again before the state changes would only use up
        serving's slack."""
        self._starved_until_s = 0.0
        spec = self.vllm_config.speculative_config
        self._drafter_slots = spec.max_num_new_slots_for_drafting if spec is not None else 0
        """The further tokens that vLLM sets aside in a step for each sequence's drafter."""
        self._has_more_decodes = False
        """Whether more sequences decode than one step holds with their drafts."""
        self._waits_since_s = time.monotonic()

    def set_gate(self, gate: GateSettings) -> None:
        super().set_gate(gate)
        self._gate = GatePolicy(gate)
        if gate.mode is GateMode.OFF:
            self._want_nothing()

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Stops the stall clock during a pause, in which requests wait for new weights, or for the engine's
        own to come back."""
        super().set_pause_state(pause_state)
        if pause_state is PauseState.UNPAUSED:
            self._stalls.activate(time.monotonic())
        else:
            self._stalls.deactivate(time.monotonic())
            self._want_nothing()

    def _want_nothing(self) -> None:
        """Takes back the wish for grants, for which serving would otherwise go on waiting."""
        if self._side is not None:
            self._side.set_want(False)

    def add_request(self, request: Request) -> None:
        take_over(request, self.structured_output_manager)
        super().add_request(request)

    # Ahead of the step ----------------------------------------------------------------------------------

    def before_step(self, now: float) -> None:
        memory = self._memory
        wanted_step = self.page.get(Field.RL_STEP)
        if memory is not None and wanted_step != self._rl_step:
            self._rl_step = wanted_step
            memory.begin_rl_step(wanted_step)
        if memory is not None:
            memory.share = self.page.memory_share
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
        """Ends every request and returns all slabs. A request that arrives later ends at once as well."""
        if self.requests:
            self.end_requests(list(self.requests), StopReason.DEACTIVATED)
        if self._memory is not None:
            self._memory.give_everything_back()
            self.wake_at(None)
        self.page.put(Field.IS_INACTIVE, 1)

    def _must_pass(self) -> bool:
        # vLLM pauses a sleeping engine, and a paused engine does not step for a waiting request.
        return super()._must_pass() or (self._is_wanted_inactive and bool(self.requests))

    def must_drain(self) -> bool:
        """Each grant is for one step, and serving waits for no more than that."""
        return super().must_drain() or self._is_gated

    def _end_stalled(self, now: float) -> None:
        # Requests beyond the free slots are left out: they wait for a slot, not for compute or memory.
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
        side = self._side
        if side is None or not self._is_gated:
            return self._schedule(throttle_prefills)
        # otherwise the grant would count their tokens, and other sequences would use them
        self._drop_stale_drafts()
        limit = 0 if self.awaits_tokens() else self._ask_for_grant(side)
        most = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = min(limit, most)
        try:
            output = self._schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = most
        if self._is_stepping and output.total_num_scheduled_tokens == 0:
            self._end_grant(0)
            self._starved, self._starved_until_s = self._memory_state(), time.monotonic() + STARVED_RETRY_S
        return output

    @property
    def _is_gated(self) -> bool:
        return self._side is not None and self._gate.settings.mode is not GateMode.OFF

    def _schedule(self, throttle_prefills: bool) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        for data in output.scheduled_new_reqs:
            count_as_output(self.requests[data.req_id], data)
        if self.tenant is not None:
            has_tokens_left = output.total_num_scheduled_tokens < self.max_num_scheduled_tokens
            self._refused = self._refused_by_serving(self.tenant, has_tokens_left)
        return output

    def _refused_by_serving(self, tenant: Tenant, has_tokens_left: bool) -> list[str]:
        """Returns the ids of waiting requests that lack memory because serving has it.

        These are the preempted requests, and all waiting ones if the last step had tokens left and did not
        take them. A request that fits into this engine's own slabs is left out, because it waits only for
        other rollouts. It keeps its place in line: a long prompt that was sent away would find the memory
        taken by short ones whenever it came back.
        """
        refused = {RequestStatus.PREEMPTED, *([RequestStatus.WAITING] if has_tokens_left else [])}
        waiting = [request for request in self.waiting_requests() if request.status in refused]
        return [request.request_id for request in waiting if not tenant.fits_alone(request)]

    def _ask_for_grant(self, side: RolloutSide) -> int:
        """Returns the token limit of a step that has a grant, or 0 without one. It sleeps while nothing else
        is due, and up to the board's 20 ms longer."""
        candidate = self._candidate()
        if candidate.waited_s >= FORGET_SHARE * self.rose.stall_s:
            self.recorder.forget_stale(time.monotonic())
        view, wants = side.view(), candidate.num_decodes + candidate.prefill_tokens_waiting > 0
        side.set_want(wants, self._gate.shortest_step_s(view, candidate, self.recorder.model))
        for attempt in range(MAX_TRIES):
            decision = self._decide(candidate, view)
            if decision.is_admitted and side.try_begin(time.monotonic() + decision.step_s, view):
                self._is_stepping = True
                if self._gate.settings.mode is GateMode.IDLE:
                    self._interrupt.begin(decision.step_s)
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
            view = side.view()
        self.page.count(Field.DECLINED_STEPS)
        return 0

    def _await_grant(self, side: RolloutSide) -> bool:
        """Sleeps until a step may be tried (True) or something else wants the engine's loop (False).

        Why: a pass without a step takes every sequence out of the worker's batch, and takes CPU time from the
        engine that shares the core.
        """
        until_s = time.monotonic() + PATIENT_WAIT_S
        while not side.wait_grant():
            if not self.may_sleep_on() or time.monotonic() >= until_s:
                return False
        return True

    def _be_fair(self, decision: GateDecision, candidate: RolloutCandidate) -> None:
        """Moves the sequences of this step to the back if not all decodes fit into the slack. vLLM serves its
        running list from the front, so the next step begins with the others."""
        if decision.max_seqs < candidate.num_decodes or self._has_more_decodes:
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
        prefill = context = computed = decode_tokens = 0
        drafts: list[int] = []
        self._has_more_decodes = False
        for request in self.running:
            remaining = request.num_tokens - request.num_computed_tokens
            if remaining == 1 and request.num_output_tokens > 0:
                num_drafts = len(request.spec_token_ids)
                decode_tokens += 1 + num_drafts + self._drafter_slots
                if decode_tokens > self.max_num_scheduled_tokens:
                    self._has_more_decodes = True
                    continue
                drafts.append(num_drafts)
                context += request.num_computed_tokens
            else:
                prefill += max(0, remaining)
                computed = max(computed, request.num_computed_tokens)
        for request in self.waiting_requests():
            # If all but one token of a prompt is cached, vLLM takes it only with room for its drafts.
            prefill += max(request.num_tokens, 1 + self.num_spec_tokens)
            # vLLM finds out what is cached only while it schedules. It may be all but the last token.
            computed = max(computed, request.num_tokens - 1)
        now = time.monotonic()
        if not drafts and prefill == 0:
            self._waits_since_s = now
        return RolloutCandidate(
            prefill_tokens_waiting=min(prefill, self.max_num_scheduled_tokens),
            num_decodes=len(drafts),
            context_tokens=context,
            computed_tokens=computed,
            waited_s=now - self._waits_since_s,
            draft_tokens=tuple(drafts) if any(drafts) else (),
        )

    # After the step -----------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self._is_stepping:
            self._end_grant(scheduler_output.total_num_scheduled_tokens)
        if scheduler_output.total_num_scheduled_tokens > 0:
            self._stalls.stepped(time.monotonic(), self._refused)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _end_grant(self, num_tokens: int) -> None:
        assert self._side is not None
        self._is_stepping = False
        self.recorder.leave_out(self._interrupt.end())
        self._waits_since_s = time.monotonic()
        self._side.end_step(num_tokens)

    def shutdown(self) -> None:
        if self._side is not None:
            self._side.detach()
        super().shutdown()


class AsyncRolloutScheduler(RolloutScheduler, AsyncScheduler):
    """The scheduler of engines with ``role: rollout`` and async scheduling. Behind a gate it has no more than
    one step in flight."""
