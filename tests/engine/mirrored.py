"""A mirror whose versions are given as tensors, without a relay: what a subscriber hands to engines."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rose.messages import WeightUpdate
from rose.transfer.follow.shared_mirror import SharedMirror
from rose.transfer.format.codec import Elements
from rose.transfer.format.layout import Bucket, Layout, TensorCut
from rose.transfer.format.shared_planes import SharedPlanes
from rose.transfer.publish.torch_source import TorchSource
from rose.types import WeightVersion

if TYPE_CHECKING:
    from rose.engine.weights.weights import StagedWeightEngine

BUCKET_BYTES = 4096
"""Small, so that buckets begin and end inside tensors."""


class Mirrored:
    """Versions 0, 1, ... of a run."""

    def __init__(self, folder: Path, cuts: dict[str, TensorCut] | None = None) -> None:
        self.store = SharedMirror(folder)
        self._cuts = cuts
        self._planes: SharedPlanes | None = None
        self._number = -1

    @property
    def version(self) -> str:
        return f"test/{self._number}"

    def put(self, tensors: dict[str, torch.Tensor]) -> WeightUpdate:
        """Makes these tensors the next version; returns what brings an engine from the last one to it."""
        before = self.version if self._planes is not None else None
        source = TorchSource(tensors, dtype=None)
        self._number += 1
        version = WeightVersion(run_id="test", number=self._number)
        if self._planes is None:
            layout = Layout(source.specs(), BUCKET_BYTES, self._cuts)
            planes = self._planes = self.store.make_planes(layout)
            for bucket in layout.buckets:
                planes.fill(bucket, np.concatenate(source.read(layout, bucket)))
            self.store.arrived(planes, version, planes.state_hash)
        else:
            self._change(self._planes, source, version)
        return self.update_from(before)

    def _change(self, planes: SharedPlanes, source: TorchSource, version: WeightVersion) -> None:
        changes: list[tuple[Bucket, Elements]] = []
        for bucket in planes.layout.buckets:
            old, new = planes.bits(bucket), np.concatenate(source.read(planes.layout, bucket))
            places = np.flatnonzero(old != new).astype(np.int32)
            if places.size > 0:
                changes.append((bucket, Elements(places=places, old=old[places], new=new[places])))
        counts = [(bucket, elements.places.size) for bucket, elements in changes]
        with self.store.changing(planes, counts) as note:
            for bucket, elements in changes:
                planes.follow(bucket, np.concatenate(source.read(planes.layout, bucket)))
                if note is not None:
                    note(bucket, elements)
            self.store.arrived(planes, version, planes.state_hash)

    def update_from(self, base: str | None) -> WeightUpdate:
        update = self.store.update_from(base)
        assert update is not None
        return update

    def close(self) -> None:
        self.store.close()


def prepare(engine: "StagedWeightEngine", paths: Sequence[str], state_hash: str) -> str | None:
    """Has a rank prepare the changes in these files, to the end; returns why it has to load all weights."""
    reason = engine.begin_changes(list(paths), state_hash)
    while reason is None:
        is_done, reason = engine.changes_result()
        if is_done:
            break
        time.sleep(0.001)
    return reason
