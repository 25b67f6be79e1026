"""A trainer's copy of what it published last, with which new weights are compared.

Owns the choice of where to compare (open_kept_copy), and the second copy for comparing on a device. Patches,
bits and hashes are the same wherever they are made. The planes in host memory are always kept up to date,
because snapshots and retries are written from them. Never talks to a relay. Several threads may work on
different buckets.
"""

import logging
import threading
from functools import partial
from typing import Any, Protocol

import numpy as np

from rose.transfer.format.codec import SparsePatch
from rose.transfer.format.device.deltas import DeviceDeltas, device_deltas
from rose.transfer.format.layout import Bucket
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.format.state_hash import StateHash
from rose.transfer.publish.torch_source import TorchSource

logger = logging.getLogger(__name__)


class KeptCopy(Protocol):
    """The copy that the encoder compares the live weights with."""

    @property
    def planes(self) -> WeightPlanes:
        """The copy in host memory."""

    def fill(self, bucket: Bucket) -> None:
        """Sets the bucket to the live weights."""

    def follow(self, bucket: Bucket) -> tuple[SparsePatch, StateHash]:
        """Does what fill() does; returns what that changed, and the change of the hash."""

    def revert(self, bucket: Bucket, patch: SparsePatch, before: StateHash) -> None:
        """Undoes the bucket's last follow(). before: the bucket's hash before it."""


def open_kept_copy(source: TorchSource, planes: WeightPlanes) -> KeptCopy:
    """Compares on the device if all weights lie on one that has kernels and room, else on the processor."""
    device = source.device()
    deltas = device_deltas(device)
    if deltas is None:
        return HostCopy(source, planes)
    try:
        return DeviceCopy(source, planes, deltas, device)
    except MemoryError as error:
        logger.warning("codec=processor: no room for a copy of the weights: %s", error)
        return HostCopy(source, planes)


class HostCopy:
    """Compares on the processor; weights on a device are copied to the host first."""

    def __init__(self, source: TorchSource, planes: WeightPlanes) -> None:
        self._source = source
        self.planes = planes

    def fill(self, bucket: Bucket) -> None:
        self.planes.fill(bucket, np.concatenate(self._source.read(self.planes.layout, bucket)))

    def follow(self, bucket: Bucket) -> tuple[SparsePatch, StateHash]:
        return self.planes.follow(bucket, self._source.read(self.planes.layout, bucket))

    def revert(self, bucket: Bucket, patch: SparsePatch, before: StateHash) -> None:
        self.planes.revert(bucket, patch, before)


class DeviceCopy:
    """Compares on the weights' device, with a second copy of the held buckets there.

    Only changes cross to the host. Raises: MemoryError.
    """

    def __init__(self, source: TorchSource, planes: WeightPlanes, deltas: DeviceDeltas, device: Any) -> None:
        self._source = source
        self.planes = planes
        self._deltas = deltas
        self._kept: dict[int, Any] = {}
        for index in sorted(planes.held):
            bits = planes.bits(planes.layout.buckets[index])
            self._kept[index] = deltas.zeros(bits.size, bits.itemsize, device)
        most_bytes = max((kept.nbytes for kept in self._kept.values()), default=0)
        self._make_room = partial(deltas.zeros, most_bytes, 1, device)
        self._scratch = threading.local()

    def fill(self, bucket: Bucket) -> None:
        kept = self._kept[bucket.index]
        self._source.gather(self.planes.layout, bucket, kept)
        self.planes.fill(bucket, kept.cpu().numpy().view(self.planes.bits(bucket).dtype))

    def follow(self, bucket: Bucket) -> tuple[SparsePatch, StateHash]:
        """Raises: RuntimeError when a kernel failed or the two copies differ; nothing was changed then."""
        kept = self._kept[bucket.index]
        new = self._room_for(kept)
        self._source.gather(self.planes.layout, bucket, new)
        delta, lanes = self._deltas.between(kept, new, bucket.first_index)
        patch, change, before = SparsePatch(delta), StateHash(*lanes), self.planes.bucket_hash(bucket)
        self.planes.patch(bucket, patch)
        found = self.planes.bucket_hash(bucket) - before
        if found != change:
            self.planes.revert(bucket, patch, before)
            raise RuntimeError(
                f"bucket {bucket.index} on {kept.device} differs from its copy in host memory: the same "
                f"patch changes the hash by {change} on the device and by {found} on the host"
            )
        kept.copy_(new)
        self._deltas.wait(kept.device)
        return patch, change

    def revert(self, bucket: Bucket, patch: SparsePatch, before: StateHash) -> None:
        self._deltas.revert(patch.delta, self._kept[bucket.index], bucket.first_index)
        self.planes.revert(bucket, patch, before)

    def _room_for(self, kept: Any) -> Any:
        """Returns a vector of this one's size and type, which belongs to the calling thread until its next
        call.
        """
        memory = getattr(self._scratch, "memory", None)
        if memory is None:
            memory = self._scratch.memory = self._make_room()
        return memory[: kept.nbytes].view(kept.dtype)
