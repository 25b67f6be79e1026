"""From an engine's configuration to its processes: the vLLM server and, for rollouts, the weight subscriber.

`rose serve` and `rose node` start the same processes. Nothing is started here: only command lines are made,
and what engines leave behind is removed.
"""

import fcntl
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from rose import ports
from rose.config import Settings, devices_of_rank, make_private_dir, vllm_plugins, worker_api_key
from rose.engine.adapter_copies import remove_left
from rose.engine.harm_records import records_path
from rose.engine.status import Field, page_path
from rose.errors import ConfigError, WorkerError
from rose.http import http_client, reason_of
from rose.memory.slabs.backend import BackendKind
from rose.node.node_config import EngineConfig, NodeConfig, PoolConfig
from rose.node.processes import ServerProcess
from rose.node.scratch import NAME_BYTES
from rose.types import Role

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 900.0
"""A large model's weights take minutes to load from disk."""
POOL_READY_TIMEOUT_S = 120.0
STATUS_TIMEOUT_S = 60.0
MOST_TEMPORARY_BYTES = 107 - (1 + NAME_BYTES) - 37
"""A socket's path has up to 107 bytes: this, a slash with the ServerProcess's folder, and 37 of vLLM's."""


def engine_process(
    engine: EngineConfig, log_path: Path | None, extra_env: Mapping[str, str] | None = None
) -> ServerProcess:
    """Describes vLLM's own API server with the plugin; ``extra_env`` is added to its environment."""
    vllm_args, additional_config = _split_additional_config(engine.vllm_args)
    follows = {"has_subscriber": True} if engine.follows_run else {}
    rose = {**follows, **engine.plugin_settings(), **additional_config.pop("rose", {})}
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", engine.model, "--host", engine.host, "--port", str(engine.port)),
        *("--additional-config", json.dumps({**additional_config, "rose": rose})),
        *_own_seed(engine, vllm_args),
        *vllm_args,
    ]
    env = {"VLLM_PLUGINS": vllm_plugins(), **(extra_env if extra_env is not None else {})}
    if (key := worker_api_key()) is not None:
        env.setdefault("VLLM_API_KEY", key)  # a flag wins over it
    # vLLM's sockets, which a killed engine leaves behind. In a folder too deep for them, it could not start.
    has_room = len(os.fsencode(tempfile.gettempdir())) <= MOST_TEMPORARY_BYTES
    scratch = "VLLM_RPC_BASE_PATH" if has_room else None
    return ServerProcess(argv, engine.name, log_path, env=env, cpus=engine.cpus, scratch=scratch)


def check_engine_exposure(engine: EngineConfig) -> None:
    """Raises: ConfigError if others than this machine would reach the engine without keys."""
    own = engine.vllm_flag("--api-key")
    if own == "":
        raise ConfigError(
            f"{engine.name}: --api-key is empty, so vLLM would ask for none; give one, or leave it out"
        )
    if (host := engine.listens_on) is None:
        return
    keys = {
        "ROSE_KEY": Settings.from_environment().key,
        "ROSE_WORKER_API_KEY": own if own is not None else worker_api_key(),
    }
    ports.check_exposure(f"{engine.name}: host", host, keys, is_insecure=engine.insecure)


def wait_engine_ready(server: ServerProcess, engine: EngineConfig, settings: Settings) -> None:
    """Waits until the engine serves, with ROSE's routes.

    vLLM logs and skips a plugin that fails to load, so without this check the engine could run without ROSE.
    Raises: WorkerError.
    """
    server.wait_ready(f"{engine.url}/health", READY_TIMEOUT_S)
    status_url = f"{engine.url}/rose/v1/status"
    try:
        with http_client(key=settings.key, timeout=STATUS_TIMEOUT_S, ca=settings.tls_ca) as client:
            answer = client.get(status_url)
    except httpx.HTTPError as error:
        raise WorkerError(f"{engine.name}: {status_url} does not answer ({reason_of(error)})") from error
    if answer.status_code == httpx.codes.NOT_FOUND:
        where = server.log_path if server.log_path is not None else "the lines above"
        raise WorkerError(f"{engine.name} runs without ROSE: vLLM could not load the plugin; see {where}")
    if not answer.is_success:
        raise WorkerError(f"{engine.name}: {status_url} answers {answer.status_code}: {answer.text[:200]}")


def subscriber_processes(
    engines: Sequence[EngineConfig], settings: Settings, log_dir: Path | None
) -> list[ServerProcess]:
    """Describes the processes that pull new weights for the engines that follow a run over a relay.

    Engines that follow the same weights share one process, and so one copy of the weights.
    """
    followers: dict[tuple[str | None, ...], list[EngineConfig]] = {}
    of_adapters: dict[tuple[str | None, ...], list[EngineConfig]] = {}
    for engine in engines:
        if not engine.is_updated or engine.relay is None:
            continue
        if engine.follows_run:
            same = (engine.relay, engine.run, engine.model, engine.staging)
            followers.setdefault(same, []).append(engine)
        if engine.adapters:
            of_adapters.setdefault((engine.relay, engine.staging, *engine.adapters), []).append(engine)
    return [
        *(_subscriber_process(fed, settings, log_dir) for fed in followers.values()),
        *(_adapters_process(fed, settings, log_dir) for fed in of_adapters.values()),
    ]


def _adapters_process(
    engines: Sequence[EngineConfig], settings: Settings, log_dir: Path | None
) -> ServerProcess:
    engine = engines[0]
    assert engine.relay is not None
    staging = make_staging_dir(engine, settings) / f"adapters-{engine.port}"
    argv = [
        *(sys.executable, "-m", "rose.transfer.adapters.subscriber"),
        *("--relay", engine.relay, "--staging", str(staging)),
        *(text for run in engine.adapters for text in ("--adapter", run)),
        *(text for each in engines for text in ("--worker", each.url)),
    ]
    name = f"adapters-{engine.port}"
    log_path = log_dir / f"{name}.log" if log_dir is not None else None
    return ServerProcess(argv, name, log_path, cpus=engine.cpus)


def _subscriber_process(
    engines: Sequence[EngineConfig], settings: Settings, log_dir: Path | None
) -> ServerProcess:
    engine = engines[0]
    assert engine.relay is not None
    argv = [
        *(sys.executable, "-m", "rose.transfer.follow.subscriber"),
        *("--relay", engine.relay, "--staging", str(make_staging_dir(engine, settings))),
    ]
    for each in engines:
        argv += ["--worker", each.url]
    if engine.run is not None:
        argv += ["--run", engine.run]
    if Path(engine.model).is_dir():
        argv += ["--base", engine.model]
    name = f"subscriber-{engine.port}"
    log_path = log_dir / f"{name}.log" if log_dir is not None else None
    return ServerProcess(argv, name, log_path, cpus=engine.cpus)


def make_staging_dir(engine: EngineConfig, settings: Settings) -> Path:
    """Makes the folder for new weights: the user's choice, or one in memory for this engine."""
    if engine.staging is not None:
        return make_private_dir(Path(engine.staging), "choose another folder for staging")
    make_private_dir(settings.staging_root, "set staging to a folder of your own")
    return make_private_dir(settings.staging_root / engine.name, "set staging to a folder of your own")


def remove_staging_dir(engine: EngineConfig, settings: Settings) -> None:
    """Removes the folder in memory: in /dev/shm it would take that memory until the next boot. It stays if a
    subscriber has it, that of an engine which was started again by hand."""
    if engine.staging is None:
        with suppress(FileNotFoundError, BlockingIOError), ExitStack() as opened:
            folder = os.open(settings.staging_root / engine.name, os.O_RDONLY)
            opened.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(settings.staging_root / engine.name, ignore_errors=True)


def remove_status_page(engine: EngineConfig, server: ServerProcess, settings: Settings) -> None:
    """Removes the page of an engine that has ended, and its copies of adapters: one that was killed could not
    do it itself."""
    for rank in range(engine.num_data_ranks):
        engine_id = engine.named(server.pid).of_rank(rank).engine_id
        page_path(settings.runtime_dir, engine_id).unlink(missing_ok=True)
        records_path(settings.runtime_dir, engine_id).unlink(missing_ok=True)
    remove_left(settings.staging_root)


def remove_dead_status_pages(settings: Settings) -> None:
    """Removes the pages and the copies of adapters of engines that were killed together with whatever had
    started them."""
    remove_left(settings.staging_root)
    for path in settings.runtime_dir.glob(page_path(settings.runtime_dir, "*").name):
        try:
            words = np.fromfile(path, dtype=np.int64, count=Field.PID + 1)
        except OSError:  # removed by its engine just now
            continue
        # 0 until its engine has written it: that one is starting.
        if len(words) > Field.PID and words[Field.PID] and not psutil.pid_exists(int(words[Field.PID])):
            logger.info("removing the status page of a dead engine path=%s", path)
            path.unlink(missing_ok=True)
            path.with_suffix(".harm").unlink(missing_ok=True)


def pool_processes(node: NodeConfig, log_dir: Path) -> list[ServerProcess]:
    """Describes the daemons of a node's pools: that of each data-parallel rank is on the rank's GPUs."""
    models = [engine.model for engine in node.engines]
    processes = []
    for rank, name in enumerate(node.pool_names):
        pool = node.pool.model_copy(update={"name": name})
        has_own_gpus = len(node.pool_names) > 1 and pool.backend is not BackendKind.HOST
        env = devices_of_rank(rank, pool.num_shards) if has_own_gpus else None
        processes.append(pool_process(pool, models, log_dir / f"pool-{name}.log", env))
    return processes


def pool_process(
    pool: PoolConfig, models: Iterable[str], log_path: Path | None, env: Mapping[str, str] | None = None
) -> ServerProcess:
    """Describes the daemon that owns the pool's slabs; ``models`` are its engines'."""
    given = {
        "--num-slabs": pool.num_slabs,
        "--slab-bytes": pool.slab_bytes,
        "--headroom-slabs": pool.headroom_slabs,
        "--num-shards": pool.num_shards,
        "--backend": pool.backend,
    }
    argv = [
        *(sys.executable, "-m", "rose.memory.daemon.daemon", pool.name),
        *(text for flag, value in given.items() if value is not None for text in (flag, str(value))),
        *(text for model in models for text in ("--model", model)),
    ]
    return ServerProcess(argv, f"pool-{pool.name}", log_path, env)


def check_cpus(engine: EngineConfig) -> None:
    """Raises: ConfigError if the engine is pinned to CPUs that this process may not use."""
    usable = os.sched_getaffinity(0)
    missing = sorted(set(engine.cpus or ()) - usable)
    if missing or engine.cpus == ():
        problem = f"this process may not use {missing}" if missing else "none is named"
        raise ConfigError(f"{engine.name}: cpus: {problem}; choose among {sorted(usable)}")


def _own_seed(engine: EngineConfig, vllm_args: list[str]) -> list[str]:
    """Gives each rollout engine a seed: with vLLM's default, siblings of a GRPO group could be equal."""
    has_seed = any(argument.partition("=")[0] == "--seed" for argument in vllm_args)
    return ["--seed", str(engine.port)] if engine.role is Role.ROLLOUT and not has_seed else []


def _split_additional_config(vllm_args: tuple[str, ...]) -> tuple[list[str], dict[str, Any]]:
    """Splits the user's own --additional-config off ``vllm_args``: vLLM would keep the last one alone."""
    flag = "--additional-config"
    kept: list[str] = []
    merged: dict[str, Any] = {}
    remaining = iter(vllm_args)
    for argument in remaining:
        name, _, value = argument.partition("=")
        if name not in (flag, flag.replace("-c", "_c")):
            kept.append(argument)
            continue
        merged.update(_json_object(value or next(remaining, ""), flag))
    return kept, merged


def _json_object(text: str, flag: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{flag}: not valid JSON ({error}): {text!r}") from error
    if not isinstance(value, dict) or not isinstance(value.get("rose", {}), dict):
        raise ConfigError(f"{flag}: expected a JSON object, got {text!r}")
    return value
