"""The versions of an adapter as folders on an engine's host, as PEFT saves them.

Owns the folder `RUN@VERSION` of the newest version, and those that an engine is still loading. A folder never
changes once it has its name; an engine that loads one makes a copy of its own.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from rose.messages import WeightUpdate
from rose.transfer.adapters.description import CONFIG_FILE, TENSORS_FILE
from rose.transfer.format.layout import Bucket, Layout, TensorSpec
from rose.transfer.format.manifest import AdapterBody
from rose.transfer.format.planes import WeightPlanes, bits_dtype
from rose.transfer.format.state_hash import StateHash
from rose.types import WeightVersion


def lora_name(version: WeightVersion) -> str:
    """Returns the name of one version of an adapter, for folders and for vLLM."""
    return f"{version.run_id}@{version.number}"


class AdapterFolders:
    """The store of one run's mirror. description: what the run's adapter is, once the mirror holds one."""

    def __init__(self, folder: Path, description: Callable[[], AdapterBody | None]) -> None:
        """Raises: OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._description = description
        self._planes: WeightPlanes | None = None
        self._version: WeightVersion | None = None
        self._state_hash = ""
        self._written: dict[str, Path] = {}
        for left in folder.iterdir():  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)

    def make_planes(self, layout: Layout) -> WeightPlanes:
        return WeightPlanes(layout)

    def has_room(self) -> bool:
        return True

    def changing(
        self, planes: WeightPlanes, counts: Sequence[tuple[Bucket, int]]
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def arrived(self, planes: WeightPlanes, version: WeightVersion, state_hash: StateHash) -> None:
        self._planes, self._version, self._state_hash = planes, version, str(state_hash)

    def update_from(self, base: str | None) -> WeightUpdate | None:
        """Returns the newest version's folder, which it writes first; None while there is no version.

        Raises: OSError with nothing left behind.
        """
        if self._planes is None or self._version is None:
            return None
        version = str(self._version)
        if version not in self._written or not self._written[version].is_dir():
            description = self._description()
            assert description is not None, "a mirror of an adapter without its description"
            path = self._folder / lora_name(self._version)
            write_adapter(path, self._planes, description)
            self._written[version] = path
        return WeightUpdate(version=version, path=str(self._written[version]), state_hash=self._state_hash)

    def forget(self, in_use: Collection[str]) -> None:
        """Removes the folders of versions that are neither the newest nor being taken."""
        kept = {*in_use, str(self._version)}
        for version in [each for each in self._written if each not in kept]:
            shutil.rmtree(self._written.pop(version), ignore_errors=True)

    def close(self) -> None:
        """Removes all folders."""
        for path in self._written.values():
            shutil.rmtree(path, ignore_errors=True)
        self._written.clear()


def write_adapter(path: Path, planes: WeightPlanes, description: AdapterBody) -> None:
    """Writes a folder as PEFT saves an adapter; it is there whole or not at all. Raises: OSError."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    try:
        (partial / CONFIG_FILE).write_text(json.dumps(description.config, indent=2, sort_keys=True))
        _write_tensors(partial / TENSORS_FILE, planes)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(partial, path)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_tensors(path: Path, planes: WeightPlanes) -> None:
    """Writes all tensors as a safetensors file."""
    specs = list(planes.layout.tensors)
    arrays = {spec.name: np.empty(spec.shape, bits_dtype(spec.dtype)) for spec in specs}
    planes.read_into(arrays)
    head = _head(specs)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little"))
        file.write(head)
        for spec in specs:
            file.write(arrays[spec.name].data)


def _head(specs: Sequence[TensorSpec]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.num_bytes],
        }
        at += spec.num_bytes
    head = json.dumps(header).encode()
    return head + b" " * (-len(head) % 8)  # the tensors begin at a multiple of 8, as safetensors wants
