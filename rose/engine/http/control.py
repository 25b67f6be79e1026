"""What an engine's HTTP routes do: they report its status and pass commands on.

Owns one engine's client, settings and status page on the API server's event loop. Promises that a status
never waits for the engine, and that weight updates, activation and profiling never overlap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import astuple

from prometheus_client import REGISTRY
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.protocol import EngineClient

from rose._shm import Words
from rose.admission.board import announce_arrival
from rose.admission.board_snapshot import ServingTime
from rose.admission.profile import load_profile
from rose.config import Settings
from rose.engine.harm_records import HarmRecords, records_path
from rose.engine.http.activation import INACTIVE, Activation
from rose.engine.http.adapters import EngineAdapters
from rose.engine.http.followers import Followers
from rose.engine.http.harm import HarmWatch
from rose.engine.http.leases import Leases
from rose.engine.http.loaned_run import LoanedRun
from rose.engine.http.metrics import RoseCollector
from rose.engine.http.profiling import run_shapes, shapes_for, warm_up
from rose.engine.http.streams import check_output_processor, send_held_back
from rose.engine.scheduling.recorder import profile_key
from rose.engine.settings import EngineSettings
from rose.engine.status import Field, ProfileCommand, StatusPage, page_path
from rose.engine.weights.weights import check_staged
from rose.errors import ConfigError, WorkerError
from rose.memory.ledger.policy_word import Pressure
from rose.memory.pool.pool import PoolClient, describe_pool
from rose.messages import (
    ActivationChange,
    AdapterUpdate,
    GateStatus,
    HarmHistory,
    Profile,
    WeightUpdate,
    WeightUpdated,
    WorkerStatus,
)
from rose.types import GateMode, Role

logger = logging.getLogger(__name__)

GATE_MODES = list(GateMode)
CHANGES_POLL_S = 0.02
"""Pause between two questions whether the ranks are prepared. Each goes through the engine's loop."""


class ServedEngine:
    """What the routes of one engine share."""

    def __init__(self, client: EngineClient, settings: EngineSettings, model: str) -> None:
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
        self.followers = Followers()
        self.leases: Leases | None = Leases(first_fence=time.time_ns() // 1_000_000)
        """None where several API servers share the engine."""
        self.loan = LoanedRun()
        self.adapters: EngineAdapters | None = None
        """None on an engine without --enable-lora, under pipeline parallelism, and where several API servers
        share the engine."""
        self.fails_prompt_logprobs = False
        """Whether a request for the log-probabilities of its prompt would end the engine core."""
        self._exclusive = asyncio.Lock()
        """Held during a weight update, an activation, a deactivation and a profiling run."""
        size = describe_pool(settings.pool) if settings.pool is not None else None
        self._slab_bytes = size.slab_bytes * size.num_shards if size is not None else 0
        # It stays open, because the board and the ledger are mapped through it.
        self._pool = PoolClient.observe(settings.pool) if settings.pool is not None else None
        self._serving_time = ServingTime(self._pool.board_words) if self._pool is not None else None
        host = Settings.from_environment()
        self._profile_dir = host.profile_dir
        self._page = StatusPage(page_path(host.runtime_dir, settings.engine_id), create=False)
        self._activation = Activation(client, self._page, self._before_turns)
        self._harm: HarmWatch | None = None
        board = self._serving_board
        if board is not None:
            records = HarmRecords(records_path(host.runtime_dir, settings.engine_id), create=False)
            self._harm = HarmWatch(board, records, settings, self._floors_s, self._page.get(Field.BOARD_SLOT))

    @property
    def is_active(self) -> bool:
        return self._activation.is_active

    async def start(self) -> None:
        """Measures the weights and registers the metrics. Call once, when the engine is up."""
        await self._activation.measure()
        slot = self._page.get(Field.BOARD_SLOT)
        REGISTRY.register(RoseCollector(self.status, self.harm, self._serving_board, slot))
        if self._harm is not None:
            self._harm_task = asyncio.create_task(self._harm.run(self.gate_mode))

    def listens_at(self, url: str) -> None:
        """Tells the commands of this host where the engine answers."""
        self._page.put_url(url)

    @property
    def role(self) -> Role:
        return self._settings.role

    @property
    def is_updated(self) -> bool:
        """Whether new weights may come while the engine runs."""
        return self._settings.is_updated

    def gate_mode(self) -> GateMode:
        """The gate's mode now; the profiling run and the operator change it."""
        return GATE_MODES[self._page.get(Field.GATE_MODE)]

    def harm(self) -> HarmHistory | None:
        """What rollouts cost serving; None on a rollout engine and without a pool."""
        return self._harm.history() if self._harm is not None else None

    def _floors_s(self) -> tuple[float, float]:
        return self._page.get(Field.TTFT_FLOOR_US) / 1e6, self._page.get(Field.TPOT_FLOOR_US) / 1e6

    @property
    def _serving_board(self) -> Words | None:
        """The board if this engine is its serving side, else None."""
        return self._pool.board_words if self._pool is not None and self.role is Role.SERVING else None

    def status(self) -> WorkerStatus:
        get, pool = self._page.get, self._pool
        return WorkerStatus(
            role=self._settings.role,
            deployment=self._settings.deployment,
            model=self._model,
            engine_id=self._settings.engine_id,
            weight_version=self._weight_version,
            steps=get(Field.STEPS),
            num_running=get(Field.NUM_RUNNING),
            num_waiting=get(Field.NUM_WAITING),
            kv_slabs_owned=get(Field.KV_SLABS_OWNED),
            kv_slabs_in_use=get(Field.SLABS_IN_USE),
            kv_slabs_budget=get(Field.KV_SLABS_BUDGET),
            pool_slabs_quarantined=get(Field.SLABS_QUARANTINED),
            kv_cached_blocks=get(Field.KV_CACHED_BLOCKS),
            kv_live_blocks=get(Field.KV_LIVE_BLOCKS),
            pressure=Pressure(get(Field.PRESSURE)).name.lower(),
            gate=GateStatus(
                mode=self.gate_mode(),
                tpot_target_ms=get(Field.TPOT_TARGET_US) / 1000 or None,
                admitted_steps=get(Field.ADMITTED_STEPS),
                declined_steps=get(Field.DECLINED_STEPS),
            ),
            harm=self._harm.status() if self._harm is not None else None,
            weights_in_place=self._weights_in_place,
            weights_whole=self._weights_whole,
            whole_because=self._whole_because,
            stale_drafter=self._stale_drafter,
            stalled_requests=get(Field.STALLED_REQUESTS),
            reclaimed_requests=get(Field.RECLAIMED_REQUESTS),
            leases_expired=get(Field.LEASES_EXPIRED),
            cuts=get(Field.CUTS),
            generated_tokens=get(Field.GENERATED_TOKENS),
            busy_s=get(Field.BUSY_NS) / 1e9,
            serving_busy_s=self._serving_time.read_s() if self._serving_time is not None else None,
            serving_kv_usage=pool.ledger.serving_used_slabs / pool.num_slabs if pool is not None else None,
            is_active=self._activation.is_active,
            is_updating=self._is_updating,
            continues_state=self.role is Role.ROLLOUT,
            adapters=self.adapters.versions() if self.adapters is not None else None,
            follows_loans=self.leases is not None and self.loan.is_followed,
            run_problems=self.loan.problems,
            adapter_problems=list(self.adapters.problems.values()) if self.adapters is not None else [],
            activated_at_s=self._activation.activated_at_s,
            device_weights_bytes=self._activation.weights_bytes,
            device_kv_bytes=get(Field.KV_SLABS_OWNED) * self._slab_bytes,
            device_fixed_bytes=self._activation.fixed_bytes(),
        )

    def begin_rl_step(self, step: int) -> None:
        self._page.put(Field.RL_STEP, step)

    def set_gate(self, mode: GateMode, tpot_target_ms: float | None = None) -> None:
        """Sets the gate's mode and TPOT target; None stands for the target that the engine was started with.

        Raises: ConfigError for a target above the SLO, and for a mode that does not fit the deployment.
        """
        if problem := self._settings.gate_problem(mode, tpot_target_ms):
            raise ConfigError(problem)
        self._page.put(Field.WANTED_TPOT_TARGET_US, round(1000 * tpot_target_ms) if tpot_target_ms else 0)
        self._page.put(Field.WANTED_GATE_MODE, GATE_MODES.index(mode))

    async def apply_weights(self, update: WeightUpdate) -> WeightUpdated:
        """Brings the weights to a version between two steps, and drops the KV of the old ones.

        What changes is prepared and checked while the engine still runs, and so is a checkpoint that has to
        be loaded whole; the log and the status say why. The engine pauses only to write or to load
        (weights.py). Requests in flight keep their tokens, and their KV is computed again under the new
        weights. If that fails, the old version stays in use. An inactive engine loads the newest version when
        it is activated.
        """
        async with self._exclusive:
            self.loan.require(update.version)
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
                "--max-lora-rank R, with one API server and without --pipeline-parallel-size"
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
        problems = await self._client.collective_rpc(
            "begin_weight_changes", args=(update.changes, update.state_hash)
        )
        while not any(problem is not None for problem in problems):
            results = await self._client.collective_rpc("weight_changes_result")
            problems = [problem for _, problem in results]
            if all(is_done for is_done, _ in results):
                break
            await asyncio.sleep(CHANGES_POLL_S)
        return next((problem for problem in problems if problem is not None), None)

    async def _count_update(self, update: WeightUpdate, reason: str | None) -> None:
        ranks = await self._client.collective_rpc("loaded_weights")
        self._stale_drafter = next((stale for _, _, stale in ranks if stale is not None), None)
        if reason is None:
            reason = next((why for _, why, _ in ranks if why is not None), None)
        if reason is None:
            self._weights_in_place += 1
            return
        self._weights_whole, self._whole_because = self._weights_whole + 1, reason
        logger.info("weights loaded whole: version=%s because=%s", update.version, reason)

    async def _update_between_steps(self, update: WeightUpdate, info: dict[str, object]) -> None:
        # The status tells of the update before a step is held back, so that no router sees a stall.
        self._is_updating = True
        try:
            await self._client.pause_generation(mode="keep", clear_cache=False)
            try:
                send_held_back(self._client.output_processor)
                try:
                    await self._update_weights(update, info)
                except Exception:
                    if (loaded := await self._loaded_version()) is not None:
                        await self._use(loaded)  # the old weights may be nowhere any more
                    raise
                await self._use(update.version)
            finally:
                await self._client.resume_generation()
        finally:
            self._is_updating = False

    async def _use(self, version: str) -> None:
        """Drops the KV of other weights, and returns when the routers know the version."""
        await self._client.reset_prefix_cache(reset_running_requests=True)
        self._weight_version = version
        await self.followers.until_told(version)

    async def _loaded_version(self) -> str | None:
        """Returns the version that was loaded whole since the last update began, where it is known."""
        version: str | None = (await self._client.collective_rpc("loaded_weights"))[0][0]
        return version

    async def _update_weights(self, update: WeightUpdate, info: dict[str, object]) -> None:
        # If update_weights fails, vLLM closes the session itself.
        await self._client.start_weight_update()
        await self._client.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self._client.finish_weight_update(update.version)

    async def activate(self) -> ActivationChange:
        """Restores the newest weights and adapters. Returns when turns may come."""
        async with self._exclusive:
            return await self._activation.activate()

    async def _before_turns(self) -> None:
        # The mirror may have moved on since the last update that the engine was told of.
        if (loaded := await self._loaded_version()) is not None:
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
        self.set_gate(GateMode.OFF, gate.tpot_target_ms)
        try:
            await warm_up(self._client)
            self._page.put(Field.PROFILE, ProfileCommand.RECORD)
            await run_shapes(self._client, shapes_for(self._client))
        finally:
            self._page.put(Field.PROFILE, ProfileCommand.FIT)
            self.set_gate(gate.mode, gate.tpot_target_ms)
        while (answer := self._page.get(Field.PROFILE)) == ProfileCommand.FIT:
            await asyncio.sleep(0.05)
        if answer == ProfileCommand.FAILED:
            raise WorkerError("the engine could not make a profile of these steps; see its log")

    def announce_arrival(self) -> None:
        """Tells a waiting serving scheduler that a request is on its way through this API server."""
        board = self._serving_board
        if board is not None:
            announce_arrival(board, self._page.get(Field.BOARD_SLOT))
