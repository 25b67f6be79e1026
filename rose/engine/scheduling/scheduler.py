"""What ROSE's serving and rollout schedulers have in common.

Owns tenancy in the slab pool, the status page, the watcher thread that wakes an idle engine core, the number
of steps in flight, and the end of requests with a stop reason of ROSE's. Wraps vLLM's methods and never
copies their bodies.

With async scheduling vLLM schedules the next step while the last one computes, so two are in flight. Each
role has a class for that, which has vLLM's AsyncScheduler behind this one among its bases.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rose.admission.gate import GateSettings
from rose.config import Settings
from rose.engine.memory.connector_holds import ConnectorHolds, check_shared_store
from rose.engine.memory.kv_layout import fit_longest
from rose.engine.memory.stages import block_of_core
from rose.engine.memory.tenant import Tenant
from rose.engine.scheduling.recorder import StepRecorder, profile_key, stage_shares
from rose.engine.settings import EngineSettings
from rose.engine.status import Field, ProfileCommand, StatusPage, page_path
from rose.engine.vllm_version import check_versions
from rose.memory.ledger.ledger_words import LedgerWord
from rose.types import GateMode, Role, StopReason

logger = logging.getLogger(__name__)

WATCH_S = 0.05
"""Longest time in which an idle engine notices a command on its status page."""
COMMANDS = (
    Field.RL_STEP,
    Field.WANTED_GATE_MODE,
    Field.WANTED_TPOT_TARGET_US,
    Field.PROFILE,
    Field.WANTED_INACTIVE,
)
GATE_MODES = list(GateMode)


class RoseScheduler(Scheduler):
    """vLLM's scheduler for an engine with ROSE settings. Each role has a subclass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config, kv_cache_config = kwargs["vllm_config"], kwargs["kv_cache_config"]
        check_versions(config.additional_config, "the engine core")
        settings = EngineSettings.parse(config.additional_config)
        assert settings is not None, "scheduler class chosen without rose settings"
        self.rose = settings = settings.of_rank(config.parallel_config.data_parallel_index)
        self.tenant: Tenant | None = None
        if settings.pool is not None:
            self.tenant = Tenant(
                settings.pool,
                kv_cache_config,
                role=settings.role,
                engine_id=settings.engine_id,
                world_size=config.parallel_config.world_size,
                block=block_of_core(config),
                lease_s=settings.lease_s if settings.role is Role.ROLLOUT else None,
            )
            fit_longest(kv_cache_config, config, self.tenant.layout, self.tenant.client.num_slabs)
        super().__init__(*args, **kwargs)
        if self.tenant is not None:
            self.tenant.adopt(
                self.kv_cache_manager,
                self.num_spec_tokens + self.num_lookahead_tokens,
                getattr(self.scheduler_config, "watermark", 0.0),  # not in every supported vLLM
            )
            has_drafter = config.speculative_config is not None
            self.tenant.outlives_output = has_drafter or self.connector is not None
            if self.connector is not None:
                check_shared_store(config.kv_transfer_config, self.tenant.layout)
                self.tenant.holds = ConnectorHolds(
                    self.connector,
                    config.kv_transfer_config.kv_connector_extra_config,
                    self.tenant.layout.position_of,
                )
        runtime_dir = Settings.from_environment().make_runtime_dir()
        self.page = StatusPage(page_path(runtime_dir, settings.engine_id), create=True)
        self.recorder = StepRecorder(
            profile_key(config),
            Settings.from_environment().profile_dir,
            stage_shares(config),
        )
        if self.tenant is not None and not self.recorder.is_profiled:
            nearest = self.recorder.nearest_profile
            logger.warning(
                "no step-time profile%s: rollouts step only on an idle GPU until enough steps were seen; "
                "run `rose profile` to make one",
                f" of these settings (the nearest has {nearest})" if nearest else "",
            )
        self._profile_command = ProfileCommand.NONE
        self._ended: list[tuple[Request, StopReason]] = []
        self._in_flight: deque[SchedulerOutput] = deque()
        """What was scheduled and has no output yet, passes without tokens included."""
        self._last_scheduled: frozenset[str] = frozenset()
        self._must_step = False
        self._next_due_s: float | None = None
        self._core: Any = None
        self._max_in_flight = 1
        self._input_queue: queue.Queue[Any] | None = None
        self._closing = threading.Event()
        self.set_gate(settings.gate_settings(settings.gate_mode))

    running: list[Request]
    max_num_scheduled_tokens: int
    _began_s = 0.0
    """When this scheduling pass had the GPU. Scheduling counts as a part of its step."""

    # Hooks for subclasses -------------------------------------------------------------------------

    def before_step(self, now: float) -> None:
        """Runs memory policy and deadlines ahead of every scheduling pass."""

    def after_profile(self) -> None:
        """Forgets the traffic of a profiling run that has ended."""

    def must_drain(self) -> bool:
        """Returns whether the steps in flight have to end before another one is scheduled.

        They have to in a profiling run, because the gate plans with steps that have the GPU alone. Such a
        step takes the host's time plus the device's. The time between two outputs shows only the longer one.
        """
        return self.recorder.is_recording

    def set_gate(self, gate: GateSettings) -> None:
        """Adopts these settings. Subclasses rebuild what depends on them."""
        self.page.put(Field.GATE_MODE, GATE_MODES.index(gate.mode))

    # vLLM's scheduler interface ---------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._must_step = False
        self._began_s = time.monotonic()
        self._obey_commands()
        self._drop_stale_drafts()
        self.before_step(self._began_s)
        output = super().schedule(throttle_prefills)
        if holds := self._holds():
            holds.planned()
        if output.total_num_scheduled_tokens > 0:
            self._last_scheduled = frozenset(output.num_scheduled_tokens)
            self.recorder.started(output, self.requests, self._began_s)
        if self.tenant is not None:
            is_loading = output.kv_connector_metadata is not None
            uses_memory = output.total_num_scheduled_tokens > 0 or is_loading
            output.rose_ops = self.tenant.take_ops(uses_memory=uses_memory)
            self.tenant.fence.begin()
        self._in_flight.append(output)
        self._bound_in_flight()
        self._publish_status()
        return output

    def _drop_stale_drafts(self) -> None:
        """Lets sequences that were left out of the last step go on without draft tokens.

        Why: with async scheduling the drafts stay with the worker, and Model Runner V1 keeps those of the
        last step alone (vLLM 0.32). A step that a grant or an ITL cap limits leaves sequences out.
        """
        if self.num_spec_tokens and self.scheduler_config.async_scheduling:
            for request in self.running:
                if request.request_id not in self._last_scheduled:
                    request.spec_token_ids = []

    def _bound_in_flight(self) -> None:
        """Lets vLLM queue a step behind the one just scheduled, or has it wait for that one's output first.

        Why not by has_requests(): vLLM would wait too, but its loop would sleep for 1 ms after the output.
        """
        if self._max_in_flight > 1:
            is_alone = len(self._in_flight) == 1
            self._core.batch_queue_size = 1 if is_alone and self.must_drain() else self._max_in_flight

    def awaits_tokens(self) -> bool:
        """Returns whether an empty pass is due before all sequences may decode in one step.

        Why: under Model Runner V2, a pipeline's stages before the last take over a step's tokens as many
        passes after it as there are stages, and vLLM leaves its sequences out until then. With more steps in
        flight, the steps of other sequences are these passes. vLLM 0.32.
        """
        due = (getattr(request, "next_decode_eligible_step", 0) for request in self.running)
        return max(due, default=0) > getattr(self, "current_step", 0) + 1

    @property
    def is_computing(self) -> bool:
        """Whether a step is in flight."""
        return any(output.total_num_scheduled_tokens > 0 for output in self._in_flight)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        collected = self._in_flight.popleft()
        assert collected is scheduler_output, "outputs come in the order of their steps"
        if self.tenant is not None:
            self.tenant.fence.end()
        if scheduler_output.total_num_scheduled_tokens > 0:
            busy_s = self.recorder.ended(time.monotonic())
            self.page.count(Field.STEPS)
            self.page.count(Field.BUSY_NS, int(busy_s * 1e9))
            self.page.count(Field.COMPUTED_TOKENS, scheduler_output.total_num_scheduled_tokens)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens > 0:
            produced = sum(len(one.new_token_ids) for many in outputs.values() for one in many.outputs)
            self.page.count(Field.GENERATED_TOKENS, produced)
        for request, reason in self._ended:
            per_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            per_client.outputs.append(
                EngineCoreOutput(
                    request.request_id, [], finish_reason=FinishReason.ABORT, stop_reason=str(reason)
                )
            )
        self._ended.clear()
        return outputs

    def has_requests(self) -> bool:
        if self._in_flight and self.must_drain():
            return False  # vLLM then collects the output of a step in flight and asks again
        return super().has_requests() or self._must_pass()

    def _must_pass(self) -> bool:
        """Returns whether a pass is due although it may schedule nothing: to obey a command, to answer for
        ended requests, or to have the workers unmap slabs."""
        return self._must_step or bool(self._ended) or self._has_unmaps() or self._has_kv_events()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        done = super().reset_prefix_cache(reset_running_requests, reset_connector)
        self._publish_status()  # an idle engine has no next step to do it
        return done

    def shutdown(self) -> None:
        self._closing.set()
        super().shutdown()
        self.page.close()
        if self.tenant is not None:
            self.tenant.close()

    # Ending requests --------------------------------------------------------------------------------

    def end_requests(self, request_ids: Iterable[str], reason: StopReason) -> list[Request]:
        """Ends requests as aborted. Their clients get the tokens so far and ``reason``."""
        ended = self.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)
        self._ended += [(request, reason) for request in ended]
        logger.info("requests ended reason=%s count=%d", reason, len(ended))
        return ended

    def wake_at(self, due_s: float | None) -> None:
        """Makes an idle engine step at ``due_s`` (time.monotonic), for example when a lease ends."""
        self._next_due_s = due_s

    # Waking an idle engine core ---------------------------------------------------------------------

    def bind_core(self, core: Any) -> None:
        """Starts the watcher thread. hooks/patches.py calls it once the engine core has its queues."""
        self._core, self._max_in_flight = core, core.batch_queue_size
        self._input_queue = core.input_queue
        threading.Thread(target=self._watch, name="rose-watch", daemon=True).start()

    def has_input(self) -> bool:
        """Returns whether a request or an abort waits for the engine core to take it in."""
        return self._input_queue is not None and not self._input_queue.empty()

    def may_sleep_on(self) -> bool:
        """Returns whether nothing is due in the engine's loop: no input, no command, no change of the ledger.

        It is False for an engine core in its caller's thread, which has no input queue.
        """
        return self._input_queue is not None and self._input_queue.empty() and not self._must_pass()

    def _watch(self) -> None:
        """Makes the engine step after a change of the ledger, on a command and at a due time. Runs in its own
        thread."""
        seen_change, seen_command, fired_s = self._change_seq(), self._commands(), None
        while not self._closing.is_set():
            due_s = self._next_due_s
            # The due time is remembered, not cleared: the scheduler may have set a later one meanwhile.
            is_pending = due_s is not None and due_s != fired_s
            left_s = due_s - time.monotonic() if due_s is not None and is_pending else WATCH_S
            change = self._wait_change(seen_change, min(WATCH_S, max(0.001, left_s)))
            command = self._commands()
            is_due = due_s is not None and is_pending and time.monotonic() >= due_s
            if change != seen_change or command != seen_command or is_due:
                seen_change, seen_command = change, command
                fired_s = due_s if is_due else fired_s
                self._wake()

    def _wake(self) -> None:
        if not self._must_step and self._input_queue is not None:
            self._must_step = True
            self._input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _change_seq(self) -> int:
        return self.tenant.ledger.change_seq if self.tenant is not None else 0

    def _wait_change(self, seen: int, timeout_s: float) -> int:
        if self.tenant is None:
            self._closing.wait(timeout_s)
            return 0
        return self.tenant.ledger.wait_change(seen, timeout_s)

    def _commands(self) -> tuple[int, ...]:
        return tuple(self.page.get(one) for one in COMMANDS)

    # What a KV connector still uses -----------------------------------------------------------------

    def _holds(self) -> ConnectorHolds | None:
        return self.tenant.holds if self.tenant is not None else None

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        result = super()._free_request(request, *args, **kwargs)
        if (holds := self._holds()) is not None and request.request_id in self.requests:
            holds.keeps(request.request_id, time.monotonic())
        return result

    def _free_blocks(self, request: Request) -> None:
        tenant, now = self.tenant, time.monotonic()
        if tenant is not None and (holds := tenant.holds) and holds.gives_up(request.request_id, now):
            holds.hold(tenant.positions_of(request.request_id), now)
        super()._free_blocks(request)

    # Small parts ------------------------------------------------------------------------------------

    def waiting_requests(self) -> list[Request]:
        """Returns the waiting requests that could get a slot now, in queue order."""
        free_slots = max(0, self.max_num_running_reqs - len(self.running))
        waiting = (
            request
            for request in chain(self.kv_holding_waiting, self.waiting)
            # A paused session waits for its user, not for the engine.
            if request.status is not RequestStatus.WAITING_FOR_STREAMING_REQ
        )
        return list(islice(waiting, free_slots))

    def _has_unmaps(self) -> bool:
        return self.tenant is not None and self.tenant.has_unmaps

    def _has_kv_events(self) -> bool:
        """Returns whether KV events wait for a step to publish them, as after a reset of an idle engine's
        prefix cache."""
        return bool(self.kv_cache_manager.block_pool.kv_event_queue)

    def _obey_commands(self) -> None:
        mode, target_us = self.page.get(Field.WANTED_GATE_MODE), self.page.get(Field.WANTED_TPOT_TARGET_US)
        has = self.page.get(Field.GATE_MODE), self.page.get(Field.TPOT_TARGET_US)
        if mode >= 0 and (mode, target_us) != has:
            self.page.put(Field.TPOT_TARGET_US, target_us)
            self.set_gate(self.rose.gate_settings(GATE_MODES[mode], target_us / 1000 or None))
        command = ProfileCommand(self.page.get(Field.PROFILE))
        if command is not self._profile_command:
            self._profile_command = command
            if command is ProfileCommand.RECORD:
                self.recorder.begin_profile()
            elif command is ProfileCommand.FIT:
                is_fitted = self.recorder.finish_profile()
                self.after_profile()
                self._profile_command = ProfileCommand.NONE if is_fitted else ProfileCommand.FAILED
                self.page.put(Field.PROFILE, self._profile_command)

    def _publish_status(self) -> None:
        num_running, num_waiting = self.get_request_counts()
        page = self.page
        page.put(Field.NUM_RUNNING, num_running)
        page.put(Field.NUM_WAITING, num_waiting)
        if self.tenant is not None:
            ledger, pool = self.tenant.ledger, self.tenant.pool
            page.put(Field.KV_SLABS_OWNED, self.tenant.num_owned)
            page.put(Field.SLABS_IN_USE, pool.num_positions_in_use())
            page.put(Field.KV_SLABS_BUDGET, ledger.policy.rollout_budget_slabs)
            page.put(Field.KV_CACHED_BLOCKS, pool.num_cached_blocks())
            page.put(Field.KV_LIVE_BLOCKS, pool.num_live_blocks())
            page.put(Field.PRESSURE, ledger.policy.pressure)
            page.put(Field.SLABS_QUARANTINED, ledger.num_quarantined)
            page.put(Field.CUTS, ledger.count(LedgerWord.CUTS, 0))
            page.put(Field.LEASES_EXPIRED, ledger.count(LedgerWord.EXPIRED_LEASES, 0))
