"""Which of vLLM's features an engine under ROSE may use; docs/compatibility.md has the table.

Owns the refusals. Each names the flag, the reason and the fix. Promises that an engine with a feature that
can't work under ROSE ends before it loads a model. Never changes a setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rose.admission.profile import load_profile
from rose.admission.reach import floors_s, unreachable_slo
from rose.config import Settings
from rose.engine.settings import CONFIG_KEY, EngineSettings
from rose.errors import ConfigError
from rose.types import Deployment, GateMode, Role

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ModelConfig, VllmConfig

REGISTERING = ("register_kv_caches", "register_cross_layers_kv_cache", "get_mem_pool_context")
"""Methods that a connector overrides to learn the addresses of the KV cache, which it hands to a network
card or a copy engine. That device would go on reading the old memory after a slab has moved."""
DEPLOYMENTS = {"kv_producer": Deployment.PREFILL, "kv_consumer": Deployment.DECODE}
"""The deployment for each of vLLM's kv_role. kv_both implies none: such a connector is a cache beside a
collocated engine, or belongs to a prefiller or a decoder."""


def check_arguments(engine_args: Any) -> None:
    """Refuses flags that make several engines of one. Raises: ConfigError."""
    if engine_args.data_parallel_size > 1:
        raise ConfigError(
            f"--data-parallel-size {engine_args.data_parallel_size}: a ROSE engine is one replica in the "
            f"pool of one GPU: start one engine per replica, and let the router balance them"
        )


def resolve_deployment(settings: EngineSettings, kv_transfer: KVTransferConfig | None) -> EngineSettings:
    """Returns the settings with the deployment that the operator set, else the one its connector implies.

    Raises: ConfigError for a rollout engine with one phase alone, and for a deployment that its connector
    contradicts.
    """
    kv_role = kv_transfer.kv_role if kv_transfer is not None else None
    derived = DEPLOYMENTS.get(kv_role) if kv_role is not None else None
    if settings.role is Role.ROLLOUT:
        if derived is not None:
            raise ConfigError(
                f"--kv-transfer-config kv_role {kv_role}: a rollout engine computes both phases wherever it "
                f"runs: leave the connector out, or set kv_both if it is a cache"
            )
        return settings
    wanted = settings.deployment
    if wanted is None:
        return settings.deployed(derived if derived is not None else Deployment.COLLOCATED)
    if wanted is Deployment.COLLOCATED:
        return settings
    if kv_role is None:
        raise ConfigError(
            f"--additional-config: '{CONFIG_KEY}.deployment' is {wanted}, but nothing carries KV between "
            f"prefiller and decoder: set --kv-transfer-config, or leave deployment out"
        )
    if derived not in (None, wanted):
        raise ConfigError(
            f"--additional-config: '{CONFIG_KEY}.deployment' is {wanted}, but --kv-transfer-config has "
            f"kv_role {kv_role}, which says {derived}: drop one of the two"
        )
    return settings


def check_config(config: VllmConfig, settings: EngineSettings) -> None:
    """Refuses what can't work in a slab pool. An engine without a pool may use all of vLLM.

    Raises: ConfigError.
    """
    if settings.pool is None:
        return
    _check_model(config.model_config)
    if config.model_config.is_hybrid and config.cache_config.enable_prefix_caching:
        raise ConfigError(
            f"--model {config.model_config.model}: it keeps states beside attention, and with a prefix "
            f"cache vLLM's Mamba2 layers end a pool's engine on a CPU: set --no-enable-prefix-caching"
        )
    _check_connectors(config, settings.role)
    _check_scheduling(config, settings)
    if settings.role is Role.SERVING:
        _check_slo(config, settings)


def _check_slo(config: VllmConfig, settings: EngineSettings) -> None:
    """Refuses an SLO that the engine's profile says it can't reach, with what it can."""
    from rose.engine.scheduling.recorder import profile_key  # imports vllm

    stored = load_profile(Settings.from_environment().profile_dir, profile_key(config))
    if stored is None:
        return
    deployment = settings.deployment if settings.deployment is not None else Deployment.COLLOCATED
    if problem := unreachable_slo(settings.slo(), floors_s(stored[0]), deployment):
        raise ConfigError(f"--additional-config: '{CONFIG_KEY}': {problem}")


def _check_model(model: ModelConfig) -> None:
    kinds = {
        "has no attention": model.is_attention_free,
        "is an encoder-decoder": model.is_encoder_decoder,
    }
    for kind, is_so in kinds.items():
        if is_so:
            raise ConfigError(
                f"--model {model.model}: it {kind}, and a slab pool holds only the KV of decoder attention, "
                f"with states beside it: serve it without --pool"
            )


def _check_connectors(config: VllmConfig, role: Role) -> None:
    if config.kv_transfer_config is None or config.kv_transfer_config.kv_connector is None:
        return
    if role is Role.ROLLOUT:
        raise ConfigError(
            f"--kv-transfer-config {config.kv_transfer_config.kv_connector}: a cut takes a rollout engine's "
            f"slabs while a connector may still read them: use KV connectors in the serving engine alone"
        )
    for one in _connectors(config.kv_transfer_config):
        connector = _load(one)
        if config.model_config.use_mla and _flattens_latents(connector):
            raise ConfigError(
                f"--kv-transfer-config {one.kv_connector}: it takes a layer's blocks of latent attention for "
                f"one piece of memory, and in a slab pool every block has all layers: use another connector, "
                f"or serve without --pool"
            )
        if names := _registers(connector):
            raise ConfigError(
                f"--kv-transfer-config {one.kv_connector}: it keeps addresses of the KV cache ({names}), and "
                f"the memory behind them changes when a slab moves: use a connector that copies inside the "
                f"step, as ExampleConnector does, or serve without --pool"
            )


def _connectors(config: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """Yields the connector, or those inside it if it is a MultiConnector."""
    from vllm.config import KVTransferConfig

    if config.kv_connector != "MultiConnector":
        yield config
        return
    for child in config.kv_connector_extra_config.get("connectors", ()):
        yield from _connectors(KVTransferConfig(**child))


def _load(config: KVTransferConfig) -> type:
    """Returns the connector's class. Raises: ConfigError if it can't be loaded."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        connector: type = KVConnectorFactory.get_connector_class(config)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--kv-transfer-config {config.kv_connector}: can't be loaded: {error}") from error
    return connector


def _flattens_latents(connector: type) -> bool:
    """Whether the connector is vLLM's example. It reshapes all blocks of a layer, slabs or not, which copies
    them where they do not lie side by side: that reads memory without a slab, and what it loads is lost."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    return issubclass(connector, ExampleConnector)


def _registers(connector: type) -> str:
    """Returns the names of ``REGISTERING`` that the connector overrides, "" if none."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    own = [
        name
        for name in REGISTERING
        if getattr(connector, name, None) is not getattr(KVConnectorBase_V1, name, None)
    ]
    return ", ".join(own)


def _check_scheduling(config: VllmConfig, settings: EngineSettings) -> None:
    if config.speculative_config is not None:
        raise ConfigError(
            "--speculative-config: the slab budget and the predicted step times do not count draft tokens "
            "so far: leave it out, or serve without --pool"
        )
    watermark = getattr(config.scheduler_config, "watermark", 0.0)  # not in every supported vLLM
    if watermark > 0:
        raise ConfigError(
            f"--watermark {watermark}: vLLM would count it in blocks of the whole pool, which one engine "
            f"never holds: leave it out and set the reserve with the pool's --headroom-slabs"
        )
    is_gated = settings.role is Role.ROLLOUT and settings.gate is not GateMode.OFF
    if is_gated and not config.scheduler_config.enable_chunked_prefill:
        raise ConfigError(
            "chunked prefill is off (--no-enable-chunked-prefill, or latent attention on a CPU): the gate "
            "splits rollouts' prefills to fit them into serving's slack: leave it on, or set --gate off"
        )
