"""ROSE's routes on vLLM's API server: ``/rose/v1/...`` (entry point group ``vllm.endpoint_plugins``).

Owns the HTTP surface of one engine: status for the router, commands from it, weights from the subscriber.
Promises that status never waits for the engine. Loaded only where ``VLLM_PLUGINS`` names ``rose``.
"""

from __future__ import annotations

import asyncio
import hmac
from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from starlette.datastructures import State
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.protocol import EngineClient

from rose.admission.board import announce_arrival
from rose.admission.profile import load_profile
from rose.config import Settings
from rose.engine.profiling import run_shapes, shapes_for
from rose.engine.recorder import profile_key
from rose.engine.settings import EngineSettings
from rose.engine.status import Field, ProfileCommand, StatusPage, page_path
from rose.memory.ledger import Pressure
from rose.memory.pool import PoolClient
from rose.messages import GateChange, GateStatus, Profile, RlStep, WeightUpdate, WeightUpdated, WorkerStatus
from rose.types import GateMode, Role

GATE_MODES = list(GateMode)


class EngineControl:
    """What the routes share for one engine: its client, its settings, its status page."""

    def __init__(self, client: EngineClient, settings: EngineSettings, model: str) -> None:
        self._client = client
        self._settings = settings
        self._model = model
        self._weight_version: str | None = None
        self._weights_lock = asyncio.Lock()
        # Kept open: the board's page is mapped through it.
        self._pool = (
            PoolClient.observe(settings.pool)
            if settings.pool is not None and settings.role is Role.SERVING
            else None
        )
        self._board = self._pool.board_words if self._pool is not None else None
        self._page = StatusPage(
            page_path(Settings.from_environment().runtime_dir, settings.engine_id), create=False
        )

    def status(self) -> WorkerStatus:
        get = self._page.get
        return WorkerStatus(
            role=self._settings.role,
            model=self._model,
            engine_id=self._settings.engine_id,
            weight_version=self._weight_version,
            steps=get(Field.STEPS),
            num_running=get(Field.NUM_RUNNING),
            num_waiting=get(Field.NUM_WAITING),
            kv_slabs_owned=get(Field.KV_SLABS_OWNED),
            kv_slabs_in_use=get(Field.SLABS_IN_USE),
            kv_slabs_budget=get(Field.KV_SLABS_BUDGET),
            kv_cached_blocks=get(Field.KV_CACHED_BLOCKS),
            kv_live_blocks=get(Field.KV_LIVE_BLOCKS),
            pressure=Pressure(get(Field.PRESSURE)).name.lower(),
            gate=GateStatus(
                mode=GATE_MODES[get(Field.GATE_MODE)],
                admitted_steps=get(Field.ADMITTED_STEPS),
                declined_steps=get(Field.DECLINED_STEPS),
            ),
            stalled_requests=get(Field.STALLED_REQUESTS),
            reclaimed_requests=get(Field.RECLAIMED_REQUESTS),
            leases_expired=get(Field.LEASES_EXPIRED),
            cuts=get(Field.CUTS),
            generated_tokens=get(Field.GENERATED_TOKENS),
            busy_s=get(Field.BUSY_NS) / 1e9,
        )

    def begin_rl_step(self, step: int) -> None:
        self._page.put(Field.RL_STEP, step)

    def set_gate(self, mode: GateMode) -> None:
        self._page.put(Field.WANTED_GATE_MODE, GATE_MODES.index(mode))

    async def apply_weights(self, update: WeightUpdate) -> WeightUpdated:
        """Load a staged checkpoint between two steps; the KV of the old weights is dropped with them.

        Requests in flight keep their tokens and are computed again under the new weights. Where loading
        fails, the old version goes on serving.
        """
        async with self._weights_lock:
            await self._client.pause_generation(mode="keep", clear_cache=False)
            try:
                # Where update_weights fails, vLLM closes the session itself.
                await self._client.start_weight_update()
                await self._client.update_weights(
                    WeightTransferUpdateRequest(
                        update_info={"path": update.path, "state_hash": update.state_hash}
                    )
                )
                await self._client.finish_weight_update(update.version)
                await self._client.reset_prefix_cache(reset_running_requests=True)
            finally:
                await self._client.resume_generation()
            self._weight_version = update.version
        return WeightUpdated(version=update.version, state_hash=update.state_hash)

    async def profile(self) -> Profile:
        """Run the profiling traffic with the gate off; the fit replaces the stored one of this engine.

        Serving traffic at the same time spoils the fit, so profile before traffic comes.
        """
        gate = GATE_MODES[self._page.get(Field.GATE_MODE)]
        self.set_gate(GateMode.OFF)
        self._page.put(Field.PROFILE, ProfileCommand.RECORD)
        try:
            await run_shapes(self._client, shapes_for(self._client))
        finally:
            self._page.put(Field.PROFILE, ProfileCommand.FIT)
            self.set_gate(gate)
        while self._page.get(Field.PROFILE) != ProfileCommand.NONE:
            await asyncio.sleep(0.05)
        key = profile_key(self._client.vllm_config)
        model = load_profile(Settings.from_environment().profile_dir, key)
        if model is None:
            raise HTTPException(500, "the engine did not store its profile; see its log")
        return Profile(file=key.file_name, model=model.to_json())

    def announce_arrival(self) -> None:
        """Tell a waiting serving scheduler that a request is on its way through this front end."""
        if self._board is not None:
            announce_arrival(self._board)


def _require_key(request: Request) -> None:
    key = Settings.from_environment().key
    given = request.headers.get("authorization", "")
    if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
        raise HTTPException(401, "missing or wrong ROSE key: send 'Authorization: Bearer $ROSE_KEY'")


def _control(request: Request) -> EngineControl:
    control: EngineControl | None = getattr(request.app.state, "rose", None)
    if control is None:
        raise HTTPException(404, "this engine runs without rose settings")
    return control


router = APIRouter(prefix="/rose/v1", dependencies=[Depends(_require_key)])


@router.get("/status")
async def get_status(request: Request) -> WorkerStatus:
    return _control(request).status()


@router.post("/rl_step")
async def post_rl_step(body: RlStep, request: Request) -> RlStep:
    _control(request).begin_rl_step(body.step)
    return body


@router.post("/gate")
async def post_gate(body: GateChange, request: Request) -> GateChange:
    _control(request).set_gate(body.mode)
    return body


@router.post("/weights")
async def post_weights(body: WeightUpdate, request: Request) -> WeightUpdated:
    control = _control(request)
    if control.status().role is not Role.ROLLOUT:
        raise HTTPException(409, "weights of a serving engine are not updated through rose")
    if not Path(body.path).is_file():
        raise HTTPException(422, f"no staged checkpoint at {body.path}")
    try:
        return await control.apply_weights(body)
    except Exception as error:  # the engine's own failure, whatever it is, is the subscriber's to retry
        raise HTTPException(500, f"weights kept at the old version: {error}") from error


@router.post("/profile")
async def post_profile(request: Request) -> Profile:
    return await _control(request).profile()


class ArrivalSignal:
    """ASGI middleware: rings the board when a generation request reaches this front end.

    vLLM's engine core sees a request only after tokenizing and a queue, and not at all while its scheduler
    waits for a rollout step; the bell ends that wait.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            control: EngineControl | None = getattr(scope["app"].state, "rose", None)
            if control is not None:
                control.announce_arrival()
        await self._app(scope, receive, send)


class RoseEndpoint:
    """vLLM's ``EndpointPlugin``: attaches the routes, and finds the engine once it is up."""

    name = "rose"
    required_tasks: Any = None

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)
        app.add_middleware(ArrivalSignal)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        if engine_client is None:
            return
        config = engine_client.vllm_config
        settings = EngineSettings.parse(config.additional_config)
        if settings is not None:
            state.rose = EngineControl(engine_client, settings, str(config.model_config.served_model_name))
