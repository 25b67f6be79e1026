"""Which KV connectors a serving engine in a slab pool may use, by what they do with its memory.

Owns what is known of the connectors. A connector that copies within a step needs nothing of ROSE. One that
registers the memory gets the transfer window (kv_range.py), and slabs stay while it uses them: those of a
request whose blocks it keeps, and those that connector_holds.py lists. Its peer need not have slabs, because
a layer's part of a block has the same bytes in both. Never changes a setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rose.errors import ConfigError
from rose.types import Role

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

REGISTERING = ("register_kv_caches", "register_cross_layers_kv_cache", "get_mem_pool_context")
"""Methods that a connector overrides to learn the addresses of the KV cache. One that overrides none of them
sees a layer's cache only while the step computes it."""
KNOWN = {
    "DecodeBenchConnector": "writes within the step",
    "LMCacheConnectorV1": "copies within the step",
    "MooncakeConnector": "keeps a request's blocks until they are sent or received",
    "MooncakeStoreConnector": "keeps the blocks that it stores or loads",
    "NixlBaseConnector": "keeps a request's blocks until they are sent or received, or gives them up",
    "OffloadingConnector": "keeps no blocks; ROSE holds the slabs of its pending copies",
    "SimpleCPUOffloadConnector": "keeps the blocks that it stores or loads",
}
"""vLLM's connectors that register the KV cache, and why their transfers meet the right bytes while slabs
move. A connector that is derived from one of them counts as that one."""
EXPORTING = {"LMCacheMPConnector", "FlexKVConnectorV1"}
"""Those of vLLM's connectors that hand the memory to another process by handles of CUDA's IPC, which name a
whole allocation of cudaMalloc."""
STAGED = {"OffloadingConnector"}
"""The connectors that are tested in a pipeline, where each stage has the KV of its own layers."""
TRANSIENT = {"NixlBaseConnector", "MooncakeConnector", "DecodeBenchConnector"}
"""Connectors that keep no KV of one request for another."""
EMPTIED_SPEC = "CPUOffloadingSpec"
"""The spec of OffloadingConnector whose store vLLM can empty. A spec with further tiers keeps what is in
them."""


def check_emptied(config: VllmConfig) -> None:
    """Refuses a connector whose store keeps KV of old weights when new ones come. Raises: ConfigError."""
    if config.kv_transfer_config is None or config.kv_transfer_config.kv_connector is None:
        return
    for one in _connectors(config.kv_transfer_config):
        if problem := _store_problem(one):
            raise ConfigError(
                f"--kv-transfer-config {one.kv_connector}: {problem}, so it would give out KV of old weights "
                f"once new ones have come; use OffloadingConnector with {EMPTIED_SPEC}, or leave "
                f"--takes-weights out on a serving engine"
            )


def _store_problem(config: KVTransferConfig) -> str | None:
    """Returns why the connector's store keeps KV of old weights, or None if it does not. Raises: ConfigError
    if the connector can't be loaded."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    cannot = "vLLM can't empty its store"
    if config.kv_connector in EXPORTING:  # some can't be loaded without packages that are not vLLM's
        return cannot
    connector = _load(config)
    names = {base.__name__ for base in connector.__mro__}
    if "MooncakeStoreConnector" in names:
        return "engines share its store, and its keys name no weights"
    spec = config.kv_connector_extra_config.get("spec_name", EMPTIED_SPEC)
    if "OffloadingConnector" in names and spec != EMPTIED_SPEC:
        return f"{cannot} with spec_name {spec}"
    can_reset = getattr(connector, "reset_cache", None) is not KVConnectorBase_V1.reset_cache
    return None if can_reset or names & TRANSIENT else cannot


def check_connectors(config: VllmConfig, role: Role) -> None:
    """Raises: ConfigError for a connector that can't work in a slab pool, or that ROSE does not know."""
    if config.kv_transfer_config is None or config.kv_transfer_config.kv_connector is None:
        return
    if role is Role.ROLLOUT:
        raise ConfigError(
            f"--kv-transfer-config {config.kv_transfer_config.kv_connector}: a cut takes a rollout engine's "
            f"slabs while a connector may still read them; use KV connectors in the serving engine alone"
        )
    for one in _connectors(config.kv_transfer_config):
        if problem := _problem(one, has_latents=config.model_config.use_mla):
            raise ConfigError(f"--kv-transfer-config {one.kv_connector}: {problem}, or serve without --pool")


def works_in_stages(config: KVTransferConfig) -> bool:
    """Returns whether the connector, or each one in a MultiConnector, is known to work in a pipeline."""
    return all(one.kv_connector in STAGED for one in _connectors(config))


def preferred_layout(config: VllmConfig) -> str | None:
    """Returns the KV layout that the connector asks vLLM for, and which its peers use; None without one."""
    if config.kv_transfer_config is None or config.kv_transfer_config.kv_connector is None:
        return None
    connector: Any = _load(config.kv_transfer_config)
    layout: str | None = connector.get_required_kvcache_layout(config)
    return layout


def _connectors(config: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """Yields the connector, or those inside it if it is a MultiConnector."""
    from vllm.config import KVTransferConfig

    if config.kv_connector != "MultiConnector":
        yield config
        return
    for child in config.kv_connector_extra_config.get("connectors", ()):
        yield from _connectors(KVTransferConfig(**child))


def _problem(config: KVTransferConfig, *, has_latents: bool) -> str | None:
    """Returns why the connector is refused and what to do, or None. Raises: ConfigError if it can't be
    loaded."""
    if config.kv_connector in EXPORTING:  # some can't be loaded without packages that are not vLLM's
        return (
            "it exports the KV cache to another process by CUDA IPC handles, and slabs have none; use "
            "LMCacheConnectorV1 or OffloadingConnector"
        )
    connector = _load(config)
    names = {base.__name__ for base in connector.__mro__ if base.__module__.startswith("vllm.")}
    if has_latents and "ExampleConnector" in names:
        # It reshapes all blocks of a layer, slabs or not, which copies them where they do not lie side by
        # side: that reads memory without a slab, and what it loads is lost.
        return (
            "it takes a layer's blocks of latent attention for one piece of memory, and in a slab pool every "
            "block has all layers; use another connector"
        )
    registers = _registers(connector)
    if not registers or names & KNOWN.keys():
        return None
    return (
        f"it keeps addresses of the KV cache ({registers}), and rose does not know whether it keeps a "
        f"request's blocks as long as it uses them; use one of {', '.join(_names())}, or a connector that "
        f"copies within the step, as ExampleConnector does"
    )


def _names() -> list[str]:
    return ["NixlConnector" if name == "NixlBaseConnector" else name for name in KNOWN]


def _load(config: KVTransferConfig) -> type:
    """Returns the connector's class. Raises: ConfigError if it can't be loaded."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        connector: type = KVConnectorFactory.get_connector_class(config)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--kv-transfer-config {config.kv_connector} can't be loaded ({error}); check its "
            f"name and its packages"
        ) from error
    return connector


def _registers(connector: type) -> str:
    """Returns the names of ``REGISTERING`` that the connector overrides, "" if none."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    own = [
        name
        for name in REGISTERING
        if getattr(connector, name, None) is not getattr(KVConnectorBase_V1, name, None)
    ]
    return ", ".join(own)
