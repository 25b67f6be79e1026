"""ROSE's routes on vLLM's API server: ``/rose/v1/...`` (entry point group ``vllm.endpoint_plugins``).

Owns the HTTP interface of one engine: its status, the router's commands and the subscriber's weight updates.
control.py does what they ask. vLLM loads the module only if ``VLLM_PLUGINS`` names ``rose``.
"""

from __future__ import annotations

import hmac
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette._utils import get_route_path
from starlette.datastructures import Headers, State
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.platforms import current_platform

from rose.config import SHARE_FILES, Settings
from rose.engine.adapter_copies import AdapterCopies
from rose.engine.hooks.patches import ends_commands, stream_routed_experts
from rose.engine.hooks.plugin import log_beside_vllm
from rose.engine.hooks.priority import give_way_on_cpus
from rose.engine.http.activation import INACTIVE
from rose.engine.http.adapters import EngineAdapters
from rose.engine.http.control import ServedEngine
from rose.engine.http.front_door import FrontDoor
from rose.engine.http.leases import Ask
from rose.engine.settings import EngineSettings
from rose.engine.status import Field
from rose.errors import ConfigError, FrameError, WorkerError
from rose.messages import (
    ActivationChange,
    AdapterUpdate,
    GateChange,
    HarmHistory,
    MemoryShare,
    Profile,
    RlStep,
    RunToFollow,
    WeightUpdate,
    WeightUpdated,
    WorkerStatus,
)
from rose.ports import check_exposure, url_host
from rose.types import Role

_COMMANDS = ("rl", "serve.dev", "serve.elastic_ep", "serve.fault_tolerance", "serve.profile")
"""The packages of vllm.entrypoints whose routes command the engine. vLLM's own key does not guard them, and
VLLM_SERVER_DEV_MODE opens those that pause it or change its weights. vLLM 0.32."""
_UNGUARDED = frozenset({"/invocations", "/generative_scoring"})
"""Routes that use the model as /v1 does, without vLLM's own key. vLLM 0.32."""
_NO_KEY = "missing or wrong ROSE key: send 'Authorization: Bearer $ROSE_KEY'"


def _is_open(headers: Headers, key: str | None) -> bool:
    """Whether a request may command the engine. A key of None lets everybody in."""
    given = headers.get("authorization", "")
    return key is None or hmac.compare_digest(given.encode(), f"Bearer {key}".encode())


class GuardsCommands:
    """An ASGI middleware that asks for ROSE's key where vLLM's own routes command the engine, or use its
    model without a key."""

    def __init__(self, app: ASGIApp, key: str | None, paths: Collection[str]) -> None:
        self._app = app
        self._key = key
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_command = scope["type"] == "http" and get_route_path(scope).rstrip("/") in self._paths
        if is_command and not _is_open(Headers(scope=scope), self._key):
            await JSONResponse({"detail": _NO_KEY}, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _command_paths(app: FastAPI) -> frozenset[str]:
    modules = tuple(f"vllm.entrypoints.{package}." for package in _COMMANDS)
    routes = (route for route in app.routes if isinstance(route, APIRoute))
    return _UNGUARDED | {route.path for route in routes if route.endpoint.__module__.startswith(modules)}


def _key_check(key: str | None) -> Callable[[Request], Awaitable[None]]:
    """Returns the check that every route depends on."""

    async def check(request: Request) -> None:
        if not _is_open(request.headers, key):
            raise HTTPException(401, _NO_KEY)

    return check


def _control(request: Request) -> ServedEngine:
    control: ServedEngine | None = getattr(request.app.state, "rose", None)
    if control is None:
        raise HTTPException(404, "this engine runs without rose settings")
    return control


router = APIRouter(prefix="/rose/v1")


@router.get("/status")
async def get_status(
    request: Request,
    follower: str | None = None,
    knows: Annotated[list[str] | None, Query()] = None,
    every_s: Annotated[float, Query(gt=0)] = 0.5,
    cap: Annotated[int | None, Query(ge=1)] = None,
    wants: Annotated[int, Query(ge=0)] = 0,
    lends: Annotated[str | None, Query(min_length=1)] = None,
    priority: int = 0,
    needs: bool = False,
    run: Annotated[str | None, Query(min_length=1)] = None,
    gone: str | None = None,
) -> WorkerStatus:
    """Returns the engine's status. A router names itself as ``follower``, with the versions of weights and
    adapters that it ``knows`` and the interval of its requests. Until it knows a version of weights, no token
    of that version leaves the engine, and a new version of an adapter is not acknowledged. With a ``cap``,
    the answer has the router's lease: how many of the turns that it ``wants`` it may have, and the job to
    which the GPU is lent (its own ``lends``, or another router's). ``priority`` is that job's, and ``run``
    names the run whose weights its turns get."""
    control = _control(request)
    status = control.status()
    if follower is None:
        return status
    control.followers.asked(follower, knows if knows is not None else (), every_s)
    if cap is not None and control.leases is not None:
        ask = Ask(
            follower,
            every_s,
            cap,
            wants=wants,
            lends=lends,
            priority=priority,
            needs=needs,
            gone=gone,
            run=run,
        )
        status.lease = control.leases.asked(ask, time.monotonic())
        control.note_loan()
    return status


@router.get("/loan")
async def get_loan(
    request: Request,
    knows: str | None = None,
    problem: Annotated[str | None, Query(max_length=1000)] = None,
    wait_s: Annotated[float, Query(ge=0, le=10)] = 0.0,
) -> RunToFollow:
    """Returns the run that the engine has to follow, because its GPU is lent to a job of that run. Waits up
    to ``wait_s`` for a run other than the one that the subscriber ``knows``. ``problem``: why the engine
    can't get the weights of the known run."""
    control = _control(request)
    control.note_loan()
    return RunToFollow(run=await control.loan.asked(knows, problem, wait_s))


@router.get("/harm")
async def get_harm(request: Request) -> HarmHistory:
    """Returns what rollouts cost serving on this engine, and what they earned: lately, and in the last hours
    by tenant."""
    harm = _control(request).harm()
    if harm is None:
        raise HTTPException(409, "only a serving engine in a pool measures what rollouts cost")
    return harm


@router.post("/rl_step")
async def post_rl_step(body: RlStep, request: Request) -> RlStep:
    """Begins an RL step: the rollout budget is computed again and may grow."""
    _control(request).cores.put(Field.RL_STEP, body.step)
    return body


@router.post("/memory_share")
async def post_memory_share(body: MemoryShare, request: Request) -> MemoryShare:
    """Bounds the engine's slabs by a share of its pool's rollout budget, until its next activation."""
    try:
        _rollout_control(request).cores.set_memory_share(body.share)
    except ConfigError as error:
        raise HTTPException(409, str(error)) from error
    return body


@router.post("/gate")
async def post_gate(body: GateChange, request: Request) -> GateChange:
    """Changes the gate's mode and the TPOT target while the engine runs."""
    try:
        _control(request).set_gate(body.mode, body.tpot_target_ms)
    except ConfigError as error:
        raise HTTPException(422, str(error)) from error
    return body


@router.post("/weights")
async def post_weights(body: WeightUpdate, request: Request) -> WeightUpdated:
    """Loads a staged checkpoint; an error leaves the old weights in place."""
    control = _control(request)
    if not control.is_updated:
        raise HTTPException(409, "this serving engine takes no weights: start it with --takes-weights true")
    if not Path(body.path).is_file():
        raise HTTPException(422, f"no staged checkpoint at {body.path}: {SHARE_FILES}")
    try:
        return await control.apply_weights(body)
    except Exception as error:  # whatever failed in the engine, the subscriber may try again
        raise HTTPException(500, f"weights kept at the old version: {error}") from error


@router.post("/adapters")
async def post_adapters(body: AdapterUpdate, request: Request) -> WeightUpdated:
    """Loads a version of a LoRA adapter beside the old one, which stays in use after an error."""
    control = _control(request)
    if not control.is_updated:
        raise HTTPException(409, "this serving engine takes no adapters: start it with --takes-weights true")
    try:
        return await control.load_adapter(body)
    except WorkerError as error:  # no room yet: the subscriber tries again
        raise HTTPException(503, str(error)) from error
    except (ConfigError, FrameError) as error:
        raise HTTPException(422, str(error)) from error
    except Exception as error:  # whatever failed in the engine, the subscriber may try again
        raise HTTPException(500, f"adapter kept at the old version: {error}") from error


@router.post("/activate")
async def post_activate(request: Request) -> ActivationChange:
    """Loads the rollout model's weights onto the device again."""
    control = _rollout_control(request)
    try:
        return await control.activate()
    except Exception as error:  # whatever failed in the engine, the caller may try again
        raise HTTPException(500, f"still inactive: {error}") from error


@router.post("/deactivate")
async def post_deactivate(request: Request) -> ActivationChange:
    """Frees the rollout model's weights and KV; its requests end."""
    control = _rollout_control(request)
    try:
        return await control.deactivate()
    except ConfigError as error:
        raise HTTPException(409, str(error)) from error
    except Exception as error:
        raise HTTPException(500, f"still active: {error}") from error


def _rollout_control(request: Request) -> ServedEngine:
    control = _control(request)
    if control.role is not Role.ROLLOUT:
        raise HTTPException(409, "a serving engine is always active, and its memory is its own")
    return control


@router.post("/profile")
async def post_profile(request: Request) -> Profile:
    """Measures step times and stores the profile that the gate reads."""
    control = _control(request)
    if not control.is_active:
        raise HTTPException(409, f"nothing to profile: {INACTIVE}")
    try:
        return await control.profile()
    except WorkerError as error:
        raise HTTPException(500, str(error)) from error


def _own_url(args: Namespace) -> str:
    """Returns where this API server answers on its host; empty if it listens on a Unix socket."""
    if getattr(args, "uds", None):
        return ""
    scheme = "https" if getattr(args, "ssl_certfile", None) else "http"
    return f"{scheme}://{url_host(args.host or '')}:{args.port}"


class RoseEndpoint:
    """vLLM's ``EndpointPlugin``. It attaches the routes, and finds the engine once it is up."""

    name = "rose"
    required_tasks: Any = None

    def attach_router(self, app: FastAPI) -> None:
        key = Settings.from_environment().key
        app.include_router(router, dependencies=[Depends(_key_check(key))])
        app.add_middleware(GuardsCommands, key=key, paths=_command_paths(app))
        app.add_middleware(FrontDoor)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        if engine_client is None:
            return
        config = engine_client.vllm_config
        settings = EngineSettings.parse(config.additional_config)
        if settings is not None:
            log_beside_vllm()
            if not getattr(args, "uds", None):  # rose serve has asked, and vLLM may have been started without
                keys = {"ROSE_KEY": Settings.from_environment().key}
                with ends_commands():
                    check_exposure("--host", args.host or "0.0.0.0", keys, is_insecure=settings.insecure)
            name, num_ranks = config.model_config.served_model_name, config.parallel_config.data_parallel_size
            control = ServedEngine(engine_client, settings, str(name), num_ranks)
            outputs = getattr(config, "aux_output_config", None)  # vLLM has it from 0.32 on
            if outputs is not None and outputs.enable_return_routed_experts:
                stream_routed_experts()
            if config.parallel_config._api_process_count > 1:
                control.leases = None  # each process would see a part of the turns
            # vLLM's LoRA layers for CPUs take a token of each request where it computes all of the prompt's.
            # vLLM 0.32.
            control.fails_prompt_logprobs = config.lora_config is not None and current_platform.is_cpu()
            models = getattr(state, "openai_serving_models", None)
            if config.lora_config is not None and models is not None and control.leases is not None:
                copies = AdapterCopies(Settings.from_environment().staging_root, settings.engine_id)
                control.adapters = EngineAdapters(engine_client, models, copies, control.call_ranks)
            await control.start()
            control.listens_at(_own_url(args))
            state.rose = control
            if settings.role is Role.ROLLOUT and settings.pool is not None:
                give_way_on_cpus()
