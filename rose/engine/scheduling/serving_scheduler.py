"""The serving engine's scheduler. It has the first call on memory and compute, and offers grants to rollouts.

Owns when serving publishes its deadlines and when it lets a rollout step go first. Promises that it never
waits longer than the board's bounds, whatever the rollout engine does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rose.admission.board import closed_slices
from rose.admission.deadlines import ServingDeadlines, monotonic_arrival
from rose.admission.gate import GatePolicy, GateSettings, ServingView
from rose.admission.harm import SliceTime
from rose.admission.reach import floors_s, unreachable_slo
from rose.admission.serving_side import NO_WORK, ServingSide, StepStart
from rose.admission.slack import NEVER
from rose.admission.slices import slice_number
from rose.config import Settings
from rose.engine.harm_records import HarmRecords, records_path
from rose.engine.lockstep import in_lockstep
from rose.engine.memory.serving_memory import ServingMemory
from rose.engine.scheduling.request_keys import requested_slo, requested_tenant
from rose.engine.scheduling.scheduler import RoseScheduler
from rose.engine.status import Field
from rose.types import SLO, GateMode

logger = logging.getLogger(__name__)


class ServingScheduler(RoseScheduler):
    """The scheduler of engines with ``role: serving``."""

    _side: ServingSide | None = None
    _unreachable_slo: SLO | None = None
    """The unreachable SLO of a request that was logged last."""
    _records: HarmRecords | None = None
    _slice: SliceTime | None = None
    """The steps of the present slice of time."""
    _has_told_floors = False
    """Whether the SLO has been compared with the floors, and the log told if it is below them."""
    _is_in_wave = False
    """Whether the data-parallel ranks compute steps together now, with or without requests of this rank."""
    _context_tokens = 0
    """Computed tokens of the running requests. Summed once per step: a sum over hundreds of requests costs
    more than a publication."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_lockstep = in_lockstep(self.vllm_config)
        self._memory: ServingMemory | None = None
        if self.tenant is not None:
            self._memory = ServingMemory(
                self.tenant,
                self.rose.budget_policy(self.tenant.client),
                window_s=self.rose.serving_window_s,
                lend_idle_s=self.rose.lend_idle_s,
                tokens_per_pair=lambda: self.recorder.model.tokens_per_pair,
                now=time.monotonic(),
            )
            self.wake_at(self._memory.lends_at_s)
            self._side = ServingSide(self.tenant.client.board_words)
            self.page.put(Field.BOARD_SLOT, self._side.slot)
            self._side.set_max_step(self._gate.settings.effective_max_step_s)
            runtime_dir = Settings.from_environment().make_runtime_dir()
            self._records = HarmRecords(records_path(runtime_dir, self.rose.engine_id), create=True)
            self._tell_floors()

    def _tell_floors(self) -> None:
        """Publishes which latencies the step times allow. The log says once if an SLO is below them. An
        engine with such a profile does not start, but one without a profile learns it from its own steps."""
        if not self.recorder.is_profiled:
            return
        ttft_s, tpot_s = self._floors_s()
        self.page.put(Field.TTFT_FLOOR_US, round(1e6 * ttft_s))
        self.page.put(Field.TPOT_FLOOR_US, round(1e6 * tpot_s))
        if not self._has_told_floors:
            self._has_told_floors = True
            if (problem := self._slo_problem()) is not None:
                logger.error("serving can't reach its SLO, with rollouts or without: %s", problem)

    def _slo_problem(self, own_slo: SLO | None = None) -> str | None:
        if not self.recorder.is_profiled:
            return None
        slo = own_slo if own_slo is not None else self.rose.slo()
        return unreachable_slo(slo, self._floors_s(), self._gate.settings.deployment)

    def _floors_s(self) -> tuple[float, float]:
        return floors_s(self.recorder.observed_model, 1 + self.num_spec_tokens)

    def after_profile(self) -> None:
        self._has_told_floors = False
        self._tell_floors()
        if self._memory is not None:
            self._memory.forget_peak()

    def set_gate(self, gate: GateSettings) -> None:
        super().set_gate(gate)
        self._gate = GatePolicy(gate)
        self._deadlines = ServingDeadlines(
            gate, chunk_tokens=self.max_num_scheduled_tokens, decode_tokens=1 + self.num_spec_tokens
        )
        for request in self.requests.values():
            self._track(request, time.monotonic())
        self._deadlines.leave_out_present()
        if self._side is None:
            return
        self._side.set_max_step(self._deadlines.max_idle_step_s(time.monotonic()))
        if gate.mode is GateMode.OFF:
            # Nothing is published from now on, so a rollout engine would wait for its grant for ever. The
            # claim of the steps in flight ends too, as steady traffic always has some.
            self._side.end_step(NO_WORK, num_steps=0)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Leaves the GPU to rollouts during a pause that keeps the requests: no step would say so."""
        super().set_pause_state(pause_state)
        self._publish(time.monotonic())

    @property
    def _shares_compute(self) -> bool:
        return self._side is not None and self._gate.settings.mode is not GateMode.OFF

    # Memory and grants, ahead of the step -------------------------------------------------------------

    def before_step(self, now: float) -> None:
        if self._memory is not None:
            self.wake_at(self._memory.tick(now, self.running, self.waiting_requests()))
        if self._shares_compute and self.has_unfinished_requests():
            self._take_turn(now)

    def _take_turn(self, now: float) -> None:
        """Lets rollouts step as long as serving has slack, then claims the GPU for serving's own step."""
        side = self._side
        assert side is not None
        view = self._deadlines.view(
            now, self.recorder.model, has_work=True, context_tokens=self._context_tokens
        )
        side.publish(view)
        self._is_in_wave = self._is_lockstep
        if self._is_in_wave and side.is_stepping and not self.is_computing and self._must_let_finish(side):
            side.end_step(view, num_steps=0)
        if not side.is_stepping:  # one claim spans the steps in flight
            if not self.is_computing and side.is_wanted and self.awaits_tokens():
                # The slack is that of a step with all decodes. A drained pipeline never joins them again.
                self.max_num_scheduled_tokens = 0
                return
            # Steps that were begun with the gate off have no claim, so no grant may be offered beside them.
            if not self.is_computing and self._offer_grants(side, now, view):
                self.max_num_scheduled_tokens = 0
                return
            before_s = time.monotonic()
            if side.begin_step() is not StepStart.CLEAR:
                now = time.monotonic()
                self._deadlines.waited(now - before_s, now)
            self._began_s = time.monotonic()
        self._spare_decodes(side)

    def _offer_grants(self, side: ServingSide, now: float, view: ServingView) -> bool:
        """Returns whether an empty pass is due.

        The engine core takes in new requests between two scheduling passes. An empty pass lets a request that
        came meanwhile join this step instead of waiting for one more decode step.
        """
        handover_s = self._gate.settings.handover_s
        if self._gate.may_yield(now, view):
            if self._gate.may_repeat(view):
                waited_s = side.offer_grants(view.latest_start_s, handover_s, is_called=self.has_input)
            else:
                waited_s = side.offer_grant(view.latest_start_s, handover_s)
            self._deadlines.waited(waited_s, time.monotonic())
            return waited_s > 0 and self.has_input() and self._may_join()
        if self._must_let_finish(side):
            # The rest of a step that has begun gets one grant, whatever the slack.
            waited_s = side.offer_grant(NEVER, handover_s, to_paused=True)
            self._deadlines.waited(waited_s, time.monotonic())
        return False

    def must_drain(self) -> bool:
        """Serving keeps steps in flight until a rollout step can take the GPU behind them. In a pipeline, a
        long prompt's chunks fill the stages first. One by one, they would leave all stages but one idle."""
        if super().must_drain():
            return True
        side = self._side
        if side is None or not self._shares_compute or not side.is_wanted:
            return False
        if self.recorder.has_unused_stage and self._has_chunk_due():
            return False
        end_s = self.recorder.end_of_steps()
        if self._must_let_finish(side):
            return side.may_offer(end_s, NEVER, to_paused=True)
        view = self._deadlines.view_after(end_s, self.recorder.model, self._context_tokens)
        return self._gate.may_yield(end_s, view) and side.may_offer(end_s, view.latest_start_s)

    def _has_chunk_due(self) -> bool:
        """Whether a further chunk of a prompt could be scheduled behind those in flight."""
        return any(request.num_computed_tokens < request.num_prompt_tokens for request in self.running)

    def _must_let_finish(self, side: ServingSide) -> bool:
        """Whether a paused rollout step has to end now: it keeps memory that serving lacks, or its requests
        from being told that they have stalled."""
        paused_s = side.rollout_paused_s()
        if paused_s is None:
            return False
        is_short = self._memory is not None and self._memory.is_short
        return is_short or paused_s >= self._gate.settings.stall_timeout_s

    def _spare_decodes(self, side: ServingSide) -> None:
        """Splits prefill that arrived during a rollout step if it would break a decode's ITL cap.

        A step that is queued behind others counts from their end, when each decode has its next token.
        """
        deadlines, recorder = self._deadlines, self.recorder
        if not (side.is_wanted and deadlines.has_pending_prefill and recorder.is_profiled):
            return
        if self.scheduler_config.enable_chunked_prefill:
            begins_s, last_token_s = time.monotonic(), -NEVER
            if self.is_computing:
                begins_s = last_token_s = recorder.end_of_steps()
            room = deadlines.prefill_room(begins_s, recorder.model, self._context_tokens, last_token_s)
            # Drafts that are counted but not there would leave their tokens to prefill.
            num_drafts = sum(len(request.spec_token_ids) for request in self.running)
            self.max_num_scheduled_tokens = min(
                self.max_num_scheduled_tokens, deadlines.num_decodes + num_drafts + room
            )

    def _may_join(self) -> bool:
        return self._deadlines.may_join(time.monotonic(), self.recorder.model, self._context_tokens)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        most = self.max_num_scheduled_tokens
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = most
        if output.total_num_scheduled_tokens == 0:
            self._publish(time.monotonic())
        return output

    # After the step -----------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        now = time.monotonic()
        if scheduler_output.total_num_scheduled_tokens > 0:
            self._stamp(scheduler_output, outputs, now)
            self._publish(now, num_steps=1)
            self._record_harm(now)
        return outputs

    def _record_harm(self, now: float) -> None:
        """Records what the harm of rollouts is estimated from: ended requests, and the seconds of steps."""
        ended, self._deadlines.ended = self._deadlines.ended, []
        # Without a gate, as while a profile is made, nothing is shut out and nothing compared.
        if self._records is None or self.tenant is None or not self._shares_compute:
            return
        for delay in ended:
            self._records.add_request(delay)
        started_s = now - self.recorder.seconds
        number, sofar = slice_number(started_s), self._slice
        if sofar is None or sofar.number != number:
            if sofar is not None:
                self._records.add_slice(sofar)
            self._tell_floors()
            is_closed = closed_slices(self.tenant.client.board_words).is_closed(started_s)
            sofar = SliceTime(number=number, is_closed=is_closed)
        recorder = self.recorder
        fixed_s = recorder.model.base_s if recorder.predicted_s > 0 else 0.0
        self._slice = sofar.and_step(recorder.seconds, recorder.predicted_s, fixed_s)

    def _stamp(self, step: SchedulerOutput, outputs: dict[int, EngineCoreOutputs], now: float) -> None:
        deadlines = self._deadlines
        produced = [one for many in outputs.values() for one in many.outputs]
        num_tokens = {one.request_id: len(one.new_token_ids) for one in produced if one.new_token_ids}
        deadlines.produced(num_tokens, now, num_tokens if self.num_spec_tokens else None)
        deadlines.finished(one.request_id for one in produced if one.finish_reason is not None)
        for request_id in step.num_scheduled_tokens if deadlines.has_pending_prefill else ():
            request = self.requests.get(request_id)
            if request is not None:
                computed = max(0, request.num_computed_tokens - self._tokens_in_flight(request_id))
                deadlines.prefilled(request_id, max(0, request.num_prompt_tokens - computed), computed)
        self._context_tokens = sum(request.num_computed_tokens for request in self.running)
        deadlines.set_load(max(len(self.running) / self.max_num_running_reqs, self._kv_load()))

    def _tokens_in_flight(self, request_id: str) -> int:
        return sum(step.num_scheduled_tokens.get(request_id, 0) for step in self._in_flight)

    def _kv_load(self) -> float:
        if self.tenant is None:
            return self.kv_cache_manager.usage
        return self.tenant.pool.num_positions_in_use() / self.tenant.client.num_slabs

    def _publish(self, now: float, *, num_steps: int = 0) -> None:
        side = self._side
        if side is None or not self._shares_compute:
            return
        has_work = self.has_unfinished_requests() or self._is_in_wave
        view = self._deadlines.view(
            now, self.recorder.model, has_work=has_work, context_tokens=self._context_tokens
        )
        if side.is_stepping and not self.is_computing and not self._is_in_wave:
            side.end_step(view, num_steps=num_steps)
        else:
            side.publish(view, num_steps=num_steps)

    # Steps that all data-parallel ranks compute together -----------------------------------------------

    def begin_dummy_step(self) -> None:
        """Claims the GPU until the end of the wave, for a step without a request of this rank. The other
        ranks wait for this rank in that step."""
        self._is_in_wave = True
        if self._shares_compute and self._side is not None:
            self._side.begin_step()

    def end_wave(self) -> None:
        """Gives the GPU back, because no rank has requests any more."""
        self._is_in_wave = False
        self._publish(time.monotonic())

    # Arrivals and departures ----------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        arrival_s = monotonic_arrival(time.monotonic(), time.time(), request.arrival_time)
        self._track(request, arrival_s)
        if self._side is not None:
            if not self._side.is_stepping:
                # Publish before the announcement ends. A rollout that saw neither would start a step.
                self._publish(time.monotonic())
            self._side.absorb_arrival(arrival_s)

    def _track(self, request: Request, arrival_s: float) -> None:
        params = request.sampling_params
        extra_args = params.extra_args if params is not None else None
        own_slo = requested_slo(extra_args, self._gate.settings.slo)
        tenant = requested_tenant(extra_args)
        if own_slo is not None:
            self._expect_more_like(own_slo)
        if self._side is not None:
            self._side.set_max_step(self._deadlines.max_idle_step_s(time.monotonic()))
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self._deadlines.arrived_prefilled(request.request_id, arrival_s, own_slo, tenant)
        else:
            num_tokens = request.num_prompt_tokens
            self._deadlines.arrived(request.request_id, arrival_s, num_tokens, own_slo, tenant)

    def _expect_more_like(self, own_slo: SLO) -> None:
        """Prepares for more requests with this SLO, unless it can't be reached. An unreachable SLO holds
        rollouts back while its own requests run, and never on an idle GPU."""
        problem = self._slo_problem(own_slo)
        if problem is None:
            self._deadlines.expect_more_like(own_slo, time.monotonic())
        elif own_slo != self._unreachable_slo:
            self._unreachable_slo = own_slo
            logger.warning("the SLO of a request can't be reached: %s", problem)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        self._deadlines.finished(request.request_id for request in finished)
        if finished and self._side is not None and not self._side.is_stepping:
            self._publish(time.monotonic())
        return finished

    def shutdown(self) -> None:
        if self._side is not None:
            self._side.detach()
        if self._records is not None:
            self._records.close()
        super().shutdown()


class AsyncServingScheduler(ServingScheduler, AsyncScheduler):
    """The scheduler of engines with ``role: serving`` and async scheduling."""
