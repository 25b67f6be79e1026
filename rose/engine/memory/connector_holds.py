"""Slabs that must stay with a serving engine although no request holds a block in them, because a KV
connector may still read or write there.

A connector that keeps a request's blocks until it has sent or received them does not need this module. Its
cases are transfers that outlive their request's hold on its blocks:

- An offloading connector holds no blocks. It waits for a copy only where vLLM gives the block to another
  request, and it plans the copies of an ended request in the scheduling pass after the end.
- A connector gives a request up when its peer has not answered for as long as its own lease. The peer may
  read or write late, so the slabs stay for the longest lease that is configured. The engine itself may use
  them.

This module never decides which slabs leave. Its calls come from the engine core's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rose.errors import PoolError
from rose.memory.slabs.layout import SlabLayout

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

NIXL_LEASE_S = 30.0
"""The shortest time after which one of vLLM's connectors gives a request up, where none is configured."""
MOONCAKE_STORE = "MooncakeStoreConnector"
LEASES = ("kv_lease_duration", "decoder_kv_blocks_ttl")
"""The names under which connectors take such a time from ``kv_connector_extra_config``."""


class ConnectorHolds:
    """What the KV connector of one engine may still use."""

    def __init__(
        self, connector: Any, extra_config: Mapping[str, Any], position_of: Callable[[int], int]
    ) -> None:
        """``connector`` is vLLM's, in its role for the scheduler. ``position_of`` is that of a block's id.

        Raises: PoolError for a version of vLLM whose offloading keeps its pending copies elsewhere.
        """
        self._offloads = list(_offloads(connector))
        self._position_of = position_of
        leases = list(_leases(extra_config))
        self._lease_s = min([NIXL_LEASE_S, *leases])
        self._hold_s = max(leases, default=NIXL_LEASE_S)
        self._since: dict[str, float] = {}
        self._until: dict[int, float] = {}
        self._fell_idle: set[int] = set()

    def positions(self, now: float) -> frozenset[int]:
        """Returns the positions whose slabs have to stay."""
        pending = {
            self._position_of(block_id)
            for offload in self._offloads
            for block_id in offload._block_id_to_pending_jobs
        }
        return frozenset(pending | self._fell_idle | self._held(now).keys())

    def next_end_s(self, now: float) -> float | None:
        """Returns when the next slabs of a given-up transfer may leave, or None. Everything else ends in a
        step, which looks anyway."""
        return min(self._held(now).values(), default=None)

    def _held(self, now: float) -> dict[int, float]:
        self._until = {position: end for position, end in self._until.items() if end > now}
        return self._until

    def fell_idle(self, positions: Iterable[int]) -> None:
        """The last blocks of these positions were freed."""
        if self._offloads:
            self._fell_idle.update(positions)

    def planned(self) -> None:
        """A scheduling pass has ended, in which the connector planned its copies of all ended requests."""
        self._fell_idle.clear()

    def keeps(self, request_id: str, now: float) -> None:
        """A request has ended, and its connector keeps the blocks."""
        self._since[request_id] = now

    def gives_up(self, request_id: str, now: float) -> bool:
        """The blocks of an ended request are about to be freed. Returns whether its transfer may go on."""
        since = self._since.pop(request_id, None)
        return since is not None and now - since >= self._lease_s

    def hold(self, positions: Iterable[int], now: float) -> None:
        """Keeps the slabs of a transfer that was given up and may go on."""
        self._until.update(dict.fromkeys(positions, now + self._hold_s))


def check_shared_store(config: KVTransferConfig, layout: SlabLayout) -> None:
    """Refuses a store that engines share, where its objects are padded blocks and its keys do not say so.

    Mooncake's store moves whole blocks, and an engine with other padding, or without, fails at each of its
    requests that hits such an object. Raises: PoolError.
    """
    if not layout.padding_bytes:
        return
    for connector, extra_config in _stores(config.kv_connector, config.kv_connector_extra_config):
        if connector == MOONCAKE_STORE and not extra_config.get("cache_prefix"):
            raise PoolError(
                f"--kv-transfer-config {connector}: in slabs of {layout.slab_bytes} bytes each block of this "
                f"model has {layout.padding_bytes} bytes of padding, and engines without it that share the "
                f"store could not load them: set cache_prefix in kv_connector_extra_config to a name that "
                f"only engines with such slabs have, as slabs-{layout.slab_bytes}"
            )


def _stores(
    connector: str | None, extra_config: Mapping[str, Any]
) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """Yields a connector, or those inside a MultiConnector, each with its settings."""
    yield connector, extra_config
    for child in extra_config.get("connectors", ()):
        yield from _stores(child.get("kv_connector"), child.get("kv_connector_extra_config", {}))


def _offloads(connector: Any) -> Iterator[Any]:
    """Yields the schedulers of the offloading connectors in a connector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    if isinstance(connector, MultiConnector):
        for child in connector._connectors:
            yield from _offloads(child)
    elif isinstance(connector, OffloadingConnector):
        scheduler = connector.connector_scheduler
        if not hasattr(scheduler, "_block_id_to_pending_jobs"):
            raise PoolError(
                "vLLM's offloading keeps its pending copies where rose does not look: unsupported version"
            )
        yield scheduler


def _leases(extra_config: Mapping[str, Any]) -> Iterator[float]:
    """Yields those that are configured."""
    yield from (float(extra_config[name]) for name in LEASES if name in extra_config)
    for child in extra_config.get("connectors", ()):
        yield from _leases(child.get("kv_connector_extra_config", {}))
