"""The address range behind one rank's KV cache tensor.

Owns the range and the mapping of positions to slabs in this process. Promises that a slab is zeroed before
it is used and released only after it is unmapped. The scheduler decides which slab goes where.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.kv_cache_interface import KVCacheConfig

from rose.engine.memory.block_pool import PINNED_POSITION, position_of
from rose.engine.memory.kv_layout import BlockSize, place_on_slabs
from rose.errors import PoolError
from rose.memory.pool.pool import PoolClient
from rose.memory.pool.wire import Kind
from rose.types import Role

PINNED_SLAB_TIMEOUT_S = 30.0
RELEASE_SLABS = 16
"""The slabs that are unmapped before they are released: about 1 ms of driver calls, where a cut of 30 GiB
takes 30 ms or more."""


@dataclass(slots=True)
class SlabOps:
    """Slab operations of one ``SchedulerOutput``. Every rank applies them in this order."""

    unmap: list[tuple[int, int]] = field(default_factory=list)
    """(position, slab) pairs to unmap; the slabs then go back to the pool."""
    map: list[tuple[int, int]] = field(default_factory=list)
    """(position, slab) pairs to map; the slabs are zeroed."""
    waits: bool = False
    """Whether unmapping has to wait for the device, which may use the slabs behind its last output."""

    def __bool__(self) -> bool:
        return bool(self.unmap or self.map)


class KVRange:
    """One rank's KV address range over pool ``name``. Position 0 stays mapped."""

    def __init__(
        self,
        name: str,
        *,
        role: Role,
        engine_id: str,
        rank: int,
        world_size: int,
        device: torch.device,
        poison: bool = False,
    ) -> None:
        """``device`` is where the model computes. ``poison`` fills a slab with NaN before it leaves."""
        self._client = PoolClient.attach(
            name, role=role, engine_id=engine_id, kind=Kind.WORKER, rank=rank, world_size=world_size
        )
        self._device = device
        self._is_cuda = device.type == "cuda"
        slabs = self._client.open_slabs(device.index if self._is_cuda else 0)
        self._slabs = slabs
        self._range = slabs.reserve(self._client.num_slabs, poison=poison, guard=self._is_cuda)
        self._pinned_slab = pinned_slab(self._client, acquire=rank == 0)
        self._range.map(PINNED_POSITION, self._pinned_slab)
        self._window: Any = None

    def place(self, config: KVCacheConfig, block: BlockSize | None) -> None:
        """Rewrites a rank's configuration in place; ``block`` is the largest one of all ranks."""
        client = self._client
        place_on_slabs(config, slab_bytes=client.slab_bytes, num_positions=client.num_slabs, block=block)

    def allocation_context(self) -> TorchFunctionMode:
        """Returns a context in which vLLM's one allocation of KV memory gets this range."""
        return _AnswerZeros(self._bytes_of(self._range))

    def over_window(self, kv_caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the KV cache for a connector: the same views of the same blocks, over the transfer window.

        The window is a second address range, in which every slab of the pool is mapped for good, each at its
        position in the first range. A card or a copy engine that is told its addresses once finds every block
        there for as long as this engine owns the block's slab. What it holds of other slabs is theirs.
        """
        # Kept here, because a connector may keep the addresses alone.
        self._window = window = self._slabs.reserve(self._client.num_slabs)
        slabs = list(range(self._client.num_slabs))
        window.map_many([position_of(slab, self._pinned_slab) for slab in slabs], slabs, zero=False)
        storage = self._bytes_of(window, _num_block_bytes(kv_caches)).untyped_storage()
        return {
            layer: torch.empty(0, dtype=cache.dtype, device=cache.device).set_(
                storage, cache.storage_offset(), cache.size(), cache.stride()
            )
            for layer, cache in kv_caches.items()
        }

    def _bytes_of(self, address_range: Any, num_bytes: int | None = None) -> torch.Tensor:
        """Returns a range, or its first bytes, as a tensor, which keeps it alive."""
        if num_bytes is None:
            num_bytes = self._client.num_slabs * self._client.slab_bytes
        if self._is_cuda:
            return torch.as_tensor(_CudaBytes(address_range, num_bytes), device=self._device)
        return torch.frombuffer(address_range, dtype=torch.int8, count=num_bytes)

    def apply(self, ops: SlabOps) -> None:
        """Unmaps and releases batch by batch, so that others can take the first slabs early; then maps.

        The steps that may have used the slabs have ended (step_fence.py), and the device goes on. So each
        batch is guarded at once: between the two calls a stray read of a later step would fault. The zeroing
        takes its place in the order of the model's stream, and the host does not wait for it. With a transfer
        window it is done before this returns, because a load into a new slab is not ordered with that stream,
        and later zeros would overwrite what the load wrote.
        """
        if ops.unmap and ops.waits:
            self._range.fence()
        for first in range(0, len(ops.unmap), RELEASE_SLABS):
            batch = ops.unmap[first : first + RELEASE_SLABS]
            self._range.unmap_many([position for position, _ in batch], fence=False, guard=False)
            for _, slab in batch:
                self._client.ledger.release(slab)
            self._client.ledger.notify()
            self._range.guard()
        if ops.map:
            is_queued = self._is_cuda and self._window is None
            stream = torch.cuda.current_stream(self._device).cuda_stream if is_queued else None
            self._range.map_many([p for p, _ in ops.map], [slab for _, slab in ops.map], stream=stream)

    def close(self) -> None:
        self._client.close()


class _CudaBytes:
    """The first bytes of a range of the GPU's addresses, as torch reads them."""

    def __init__(self, address_range: Any, num_bytes: int) -> None:
        self._range = address_range
        self.__cuda_array_interface__ = {**address_range.__cuda_array_interface__, "shape": (num_bytes,)}


def _num_block_bytes(kv_caches: Mapping[str, torch.Tensor]) -> int | None:
    """Returns the bytes up to the end of the last block, where the storage of a connector's tensors ends too.

    Why: connectors tell from the storage's size that a block has all layers side by side. Where slabs leave
    a rest behind the last block, Mooncake's store would move whole blocks from each layer's address on, which
    writes over the next block. vLLM 0.30-0.33.
    """
    ends = [cache.shape[0] * cache.stride(0) * cache.element_size() for cache in kv_caches.values()]
    return max(ends, default=None)


def pinned_slab(client: PoolClient, *, acquire: bool) -> int:
    """Returns the slab of position 0, which rank 0 acquires and all others find in the ledger.

    If a serving engine's prefix cache fills the pool, the engine waits until it is given a slab.
    Raises:
        PoolError: the pool has no free slab, or rank 0 acquired none in time.
    """
    ledger = client.ledger
    deadline = time.monotonic() + PINNED_SLAB_TIMEOUT_S
    while not (owned := ledger.owned(client.slot)):
        if acquire and ledger.acquire(client.slot, 1):
            continue
        if acquire:
            ledger.want(client.slot, 1)
        is_given_up = acquire and not ledger.num_held(Role.SERVING)
        if is_given_up or time.monotonic() > deadline:
            held = {str(role): ledger.num_held(role) for role in Role}
            raise PoolError(
                f"need 1 slab for this engine's first block, {ledger.num_free} free of "
                f"{client.num_slabs}, held {held}: wait until the other engines are idle, or start the pool "
                f"with more --num-slabs"
            )
        time.sleep(0.01)
    return owned[0]


class _AnswerZeros(TorchFunctionMode):
    """Answers one call of ``torch.zeros(n, dtype=int8)`` with ``storage``, which has n bytes. Passes on every
    other call."""

    def __init__(self, storage: torch.Tensor) -> None:
        super().__init__()
        self._storage: torch.Tensor | None = storage

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs if kwargs is not None else {}
        storage = self._storage
        if (
            func is torch.zeros
            and storage is not None
            and args == (storage.numel(),)
            and kwargs.get("dtype") is torch.int8
        ):
            self._storage = None
            return storage
        return func(*args, **kwargs)

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        if self._storage is not None and exc_info[0] is None:
            raise PoolError("vLLM did not allocate its KV cache where rose expects it: unsupported version")
