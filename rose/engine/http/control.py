"""What an engine's HTTP routes do: they report its status and pass commands on.

Owns one engine's client and settings on the API server's event loop. Promises that a status
never waits for the engine, and that weight updates, activation and profiling never overlap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.protocol import EngineClient

from rose.admission.profile import load_profile
from rose.config import Settings
from rose.engine.http.activation import INACTIVE, Activation
from rose.engine.http.adapters import EngineAdapters
from rose.engine.http.cores import GATE_MODES, EngineCores
from rose.engine.http.followers import Followers
from rose.engine.http.leases import Leases
from rose.engine.http.loaned_run import LoanedRun
from rose.engine.http.metrics import RoseCollector
from rose.engine.http.profiling import run_shapes, shapes_for, warm_up
from rose.engine.http.streams import check_output_processor, pause_steps
from rose.engine.lockstep import lockstep_problem
from rose.engine.scheduling.recorder import profile_key
from rose.engine.settings import EngineSettings
from rose.engine.status import Field, ProfileCommand
from rose.engine.weights.weights import check_staged
from rose.errors import ConfigError, WorkerError
from rose.messages import (
    ActivationChange,
    AdapterUpdate,
    HarmHistory,
    Profile,
    WeightUpdate,
    WeightUpdated,
    WorkerStatus,
)
from rose.types import GateMode, Role

logger = logging.getLogger(__name__)

CHANGES_POLL_S = 0.02
"""Pause between two questions whether the ranks are prepared. Each goes through the engine's loop."""
KV_DROPPED_WITHIN_S = 5.0
"""Longest wait until the KV of the old weights can be dropped: a connector's loads are short."""


class ServedEngine:
    """What the routes of one engine share."""

    def __init__(
        self, client: EngineClient, settings: EngineSettings, model: str, num_ranks: int = 1
    ) -> None:
        """``num_ranks``: the number of data-parallel ranks, each of which is an engine core of its own."""
        check_output_processor()
        self._client = client
        self._settings = settings
        self._model = model
        self._weight_version: str | None = None
        self._is_updating = False
        self._weights_in_place = 0
        self._weights_whole = 0
        self._whole_because: str | None = None
        self._stale_drafter: str | None = None
        self._watches: list[asyncio.Task[None]] = []
        self.followers = Followers()
        self.leases: Leases | None = Leases(first_fence=time.time_ns() // 1_000_000)
        """None where several API servers share the engine."""
        self.loan = LoanedRun(has_subscriber=settings.has_subscriber)
        self.adapters: EngineAdapters | None = None
        """None on an engine without --enable-lora, and where several API servers share the engine."""
        self.fails_prompt_logprobs = False
        """Whether a request for the log-probabilities of its prompt would end the engine core."""
        self._exclusive = asyncio.Lock()
        """Held during a weight update, an activation, a deactivation and a profiling run."""
        self._profile_dir = Settings.from_environment().profile_dir
        self.cores = EngineCores(client, settings, num_ranks)
        self._activation = Activation(client, self.cores, self._before_turns)

    @property
    def is_active(self) -> bool:
        return self._activation.is_active

    async def start(self) -> None:
        """Measures the weights and registers the metrics. Call once, when the engine is up."""
        await self._activation.measure()
        for rank, core in enumerate(self.cores):
            status = partial(self._rank_status, rank)
            REGISTRY.register(RoseCollector(status, core.harm, core.board, core.board_slot))
            if core.watch is not None:
                self._watches.append(asyncio.create_task(core.watch.run(core.gate_mode)))

    async def call_ranks(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Calls a method of the workers on all ranks."""
        return await self.cores.call_ranks(method, args)

    def listens_at(self, url: str) -> None:
        """Tells the commands of this host where the engine answers."""
        next(iter(self.cores)).page.put_url(url)

    @property
    def role(self) -> Role:
        return self._settings.role

    @property
    def is_updated(self) -> bool:
        """Whether new weights may come while the engine runs."""
        return self._settings.is_updated

    def harm(self) -> HarmHistory | None:
        """Returns what rollouts cost serving; None on a rollout engine and without a pool."""
        return self.cores.harm()

    def status(self) -> WorkerStatus:
        return self.cores.status(**self._of_the_engine())

    def _rank_status(self, rank: int) -> WorkerStatus:
        return list(self.cores)[rank].status(**self._of_the_engine())

    def _of_the_engine(self) -> dict[str, Any]:
        """The part of each core's status that the cores do not know."""
        activation, adapters = self._activation, self.adapters
        return {
            "model": self._model,
            "weight_version": self._weight_version,
            "weights_in_place": self._weights_in_place,
            "weights_whole": self._weights_whole,
            "whole_because": self._whole_because,
            "stale_drafter": self._stale_drafter,
            "is_active": activation.is_active,
            "is_updating": self._is_updating,
            "adapters": adapters.versions() if adapters is not None else None,
            "follows_loans": self.leases is not None and self.loan.is_followed,
            "has_subscriber": self.loan.has_subscriber,
            "awaits_weights": self._weight_version is None and self.loan.may_have_published,
            "run_problems": self.loan.problems,
            "adapter_problems": list(adapters.problems.values()) if adapters is not None else [],
            "activated_at_s": activation.activated_at_s,
            "device_weights_bytes": activation.weights_bytes // len(self.cores),
            "device_fixed_bytes": activation.fixed_bytes() // len(self.cores),
        }

    def set_gate(self, mode: GateMode, tpot_target_ms: float | None = None) -> None:
        """Sets the gate's mode and TPOT target; None stands for the target that the engine was started with.

        Raises: ConfigError for a target above the SLO, and for a mode that does not fit the deployment.
        """
        settings, config = self._settings, self._client.vllm_config
        if problem := settings.gate_problem(mode, tpot_target_ms) or lockstep_problem(config, mode):
            raise ConfigError(problem)
        self.cores.put(Field.WANTED_TPOT_TARGET_US, round(1000 * tpot_target_ms) if tpot_target_ms else 0)
        self.cores.put(Field.WANTED_GATE_MODE, GATE_MODES.index(mode))

    def note_loan(self) -> None:
        """Tells whoever waits for it which run the loan of the GPU names now."""
        if self.leases is not None:
            self.leases.lapse(time.monotonic())
            self.loan.name(self.leases.run)

    def _require_loaned(self, version: str) -> None:
        self.note_loan()
        self.loan.require(version)

    async def apply_weights(self, update: WeightUpdate) -> WeightUpdated:
        """Brings the weights to a version between two steps, and drops the KV of the old ones.

        What changes is prepared and checked while the engine still runs, and so is a checkpoint that has to
        be loaded whole; the log and the status say why. The engine pauses only to drop KV and to write or to
        load (weights.py). Requests in flight keep their tokens, and their KV is computed again under the new
        weights. If that fails, the old version stays in use. An inactive engine loads the newest version when
        it is activated.
        """
        async with self._exclusive:
            self._require_loaned(update.version)
            is_active = self._activation.is_active
            reason = await self._prepare(update) if is_active else "the engine is inactive"
            info: dict[str, object] = {"path": update.path, "state_hash": update.state_hash}
            if reason is None:
                info["is_prepared"] = True
            else:
                info["checked"] = await asyncio.to_thread(
                    check_staged, update.path, update.state_hash, is_active=is_active
                )
            if is_active:
                await self._update_between_steps(update, info)
                await self._count_update(update, reason)
            else:
                await self._update_weights(update, info)
                self._weight_version = update.version
            self.loan.took(update.version)
        return WeightUpdated(version=update.version, state_hash=update.state_hash)

    async def load_adapter(self, update: AdapterUpdate) -> WeightUpdated:
        """Loads a version of a LoRA adapter beside those in use, and returns when the routers know it. An
        inactive engine loads it when it is activated.

        Raises: ConfigError on an engine without adapters; as EngineAdapters.load() does. The old version
        stays in use then.
        """
        if self.adapters is None:
            raise ConfigError(
                "this engine takes no LoRA adapters: start it with --enable-lora --max-loras N "
                "--max-lora-rank R, and with one API server"
            )
        async with self._exclusive:
            is_active = self.is_active
            updated = await self.adapters.load(update, is_active=is_active)
        if is_active:
            await self.followers.until_told(update.version)
        return updated

    async def _prepare(self, update: WeightUpdate) -> str | None:
        """Has all ranks prepare the changes; returns why the checkpoint has to be loaded whole, or None."""
        if update.whole_because is not None or not update.changes:
            return update.whole_because if update.whole_because is not None else "no changes were given"
        problems = await self.cores.call_ranks("begin_weight_changes", (update.changes, update.state_hash))
        while not any(problem is not None for problem in problems):
            results = await self.cores.call_ranks("weight_changes_result")
            problems = [problem for _, problem in results]
            if all(is_done for is_done, _ in results):
                break
            await asyncio.sleep(CHANGES_POLL_S)
        return next((problem for problem in problems if problem is not None), None)

    async def _count_update(self, update: WeightUpdate, reason: str | None) -> None:
        _, why = await self._loaded()
        reason = reason if reason is not None else why
        if reason is None:
            self._weights_in_place += 1
            return
        self._weights_whole, self._whole_because = self._weights_whole + 1, reason
        logger.info("weights loaded whole: version=%s because=%s", update.version, reason)

    async def _update_between_steps(self, update: WeightUpdate, info: dict[str, object]) -> None:
        # The loan may have changed while the update was prepared, and turns of another run's job may be here.
        self._require_loaned(update.version)
        # The status tells of the update before a step is held back, so that no router sees a stall. From here
        # on, no router sends a turn.
        self._is_updating = True
        began_s = time.monotonic()
        try:
            await pause_steps(self._client)
            try:
                await self._pause_without_kv()
                try:
                    await self._update_weights(update, info)
                except Exception:
                    await self._check_all_have_the_same()
                    loaded, _ = await self._loaded()
                    if loaded is not None:
                        await self._use(loaded)  # the old weights may be nowhere any more
                    raise
                await self._use(update.version)
            finally:
                await self._client.resume_generation()
                held_s = time.monotonic() - began_s
                logger.info("steps held back for weights: version=%s seconds=%.4f", update.version, held_s)
        finally:
            self._is_updating = False

    async def _pause_without_kv(self) -> None:
        """Drops all KV of a paused engine, a connector's too, while the weights that made it are in use.

        vLLM drops none while a connector loads KV for a request, and a load ends only in a step. Such
        requests alone go on then, on the old weights.

        Raises: WorkerError if KV is left after KV_DROPPED_WITHIN_S. The engine is still paused then.
        """
        deadline_s = time.monotonic() + KV_DROPPED_WITHIN_S
        while (problem := await self._drop_kv()) is not None:
            if time.monotonic() > deadline_s:
                raise WorkerError(f"the old weights stay in use, because their KV is left: {problem}")
            loading = asyncio.create_task(self._client.pause_generation(mode="wait", clear_cache=False))
            await asyncio.wait([loading], timeout=CHANGES_POLL_S)
            await pause_steps(self._client)
            await loading

    async def _drop_kv(self) -> str | None:
        """Returns why KV is left, or None."""
        try:
            is_empty = await self._client.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )
        except Exception as error:
            return str(error)
        return None if is_empty else "the KV connector did not empty its store"

    async def _use(self, version: str) -> None:
        """Returns when the routers know the version."""
        self._weight_version = version
        await self.followers.until_told(version)

    async def _loaded(self) -> tuple[str | None, str | None]:
        """Returns the version that was loaded whole since the last update began, where it is known, and why a
        prepared update was loaded whole. The status then tells of a drafter that was not updated.
        """
        ranks = await self.cores.call_ranks("loaded_weights")
        self._stale_drafter = next((stale for _, _, stale in ranks if stale is not None), None)
        return ranks[0][0], next((why for _, why, _ in ranks if why is not None), None)

    async def _have_the_same(self) -> bool:
        """Returns whether all data-parallel ranks have weights of one version."""
        return len(self.cores) == 1 or len(set(await self.cores.call_ranks("weights_hash"))) == 1

    async def _check_all_have_the_same(self) -> None:
        """Sees to it that no step runs any more if data-parallel ranks have weights of two versions, because
        one of them could not take an update that others have taken."""
        if not await self._have_the_same():
            logger.error(
                "an update failed on some data-parallel ranks alone: the engine ends at its next step"
            )
            await self.cores.call_ranks("give_up_weights")

    async def _update_weights(self, update: WeightUpdate, info: dict[str, object]) -> None:
        try:
            await self._client.start_weight_update()
            await self._client.update_weights(WeightTransferUpdateRequest(update_info=info))
            await self._client.finish_weight_update(update.version)
        except Exception:
            await self.cores.call_ranks("end_weight_update")
            raise

    async def activate(self) -> ActivationChange:
        """Restores the newest weights and adapters. Returns when turns may come."""
        async with self._exclusive:
            return await self._activation.activate()

    async def _before_turns(self) -> None:
        # The mirror may have moved on since the last update that the engine was told of, and between the
        # loads of two ranks.
        if not await self._have_the_same():
            await self.cores.call_ranks("load_newest_weights")
            if not await self._have_the_same():
                raise WorkerError("the data-parallel ranks loaded weights of two versions: activate it again")
        loaded, _ = await self._loaded()
        if loaded is not None:
            self._weight_version = loaded
        if self.adapters is not None:
            await self.adapters.load_kept()

    async def deactivate(self) -> ActivationChange:
        """Ends all requests with ``rose_deactivated``, then frees KV and weights."""
        async with self._exclusive:
            is_updated = self._weight_version is not None
            return await self._activation.deactivate(is_updated=is_updated)

    async def profile(self) -> Profile:
        """Runs the profiling traffic with the gate off. The fit replaces this engine's stored profile.

        Other traffic spoils the fit, so profile before traffic comes. Raises: WorkerError.
        """
        async with self._exclusive:
            if not self.is_active:
                raise WorkerError(f"nothing to profile: {INACTIVE}")
            await self._run_profile()
        key = profile_key(self._client.vllm_config)
        stored = load_profile(self._profile_dir, key)
        if stored is None:
            raise WorkerError("the engine did not store its profile; see its log")
        model, observations = stored
        return Profile(
            file=key.file_name, model=model.to_json(), observations=[astuple(one) for one in observations]
        )

    async def _run_profile(self) -> None:
        gate = self.status().gate
        ranks: Sequence[int | None] = range(len(self.cores)) if len(self.cores) > 1 else [None]
        self.set_gate(GateMode.OFF, gate.tpot_target_ms)
        try:
            await asyncio.gather(*(warm_up(self._client, rank) for rank in ranks))
            self.cores.put(Field.PROFILE, ProfileCommand.RECORD)
            shapes = shapes_for(self._client)
            await asyncio.gather(*(run_shapes(self._client, shapes, rank) for rank in ranks))
        finally:
            self.cores.put(Field.PROFILE, ProfileCommand.FIT)
            self.set_gate(gate.mode, gate.tpot_target_ms)
        while ProfileCommand.FIT in (answers := self.cores.get(Field.PROFILE)):
            await asyncio.sleep(0.05)
        if ProfileCommand.FAILED in answers:
            raise WorkerError("the engine could not make a profile of these steps; see its log")

    def announce_arrival(self) -> None:
        """Tells a waiting serving scheduler that a request is on its way through this API server."""
        self.cores.announce_arrival()
