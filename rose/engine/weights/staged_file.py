"""A checkpoint in a file of this host, as an engine holds it: the mirror's planes, or a safetensors file.

Owns the open file, which stays readable when its name is gone, and the check of its content. Nobody changes a
staged safetensors file. The mirror's planes move on from version to version. They are read under their lock,
and a reader that needs a certain version gets an error if they hold another one.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from rose.errors import FrameError
from rose.transfer.format.checkpoint import checkpoint_state_hash, read_checkpoint
from rose.transfer.format.layout import Layout
from rose.transfer.format.shared_planes import PlanesFile, is_planes_file

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "BOOL": torch.bool,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}


class StagedFile:
    """An open checkpoint."""

    def __init__(self, path: str) -> None:
        """Raises: OSError, FrameError."""
        self._name = path
        self._fd = os.open(path, os.O_RDONLY)
        self._path = Path(f"/proc/self/fd/{self._fd}")
        try:
            self.planes = PlanesFile(self._path) if is_planes_file(self._path) else None
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def identity(self) -> str:
        """A name that is the same in all processes of this host until the content is another one."""
        stat = os.fstat(self._fd)
        if self.planes is None:
            return f"{self.inode}:{stat.st_size}:{stat.st_mtime_ns}"
        with self.planes.reading() as (version, state_hash):
            return f"{self.inode}:{version}:{state_hash}"

    @property
    def inode(self) -> str:
        """A name of the file, whatever it holds."""
        stat = os.fstat(self._fd)
        return f"{stat.st_dev}:{stat.st_ino}"

    def check(self, state_hash: str) -> None:
        """Hashes the content. Raises: FrameError."""
        with self.reading(state_hash):
            planes = self.planes
            found = str(checkpoint_state_hash(self._path) if planes is None else planes.state_hash())
        if found != state_hash:
            raise FrameError(f"{self._name}: state hash {found}, expected {state_hash}; weights kept")

    @contextmanager
    def reading(self, state_hash: str | None = None) -> Iterator[tuple[str, str] | None]:
        """Keeps the content as it is; gives its version and state hash where the file tells them.

        Raises: FrameError where the mirror holds other bits than those of that hash, or half a version.
        """
        if self.planes is None:
            yield None
            return
        with self.planes.reading() as (version, found):
            if state_hash is not None and found != state_hash:
                holds = f"{version} of state hash {found}"
                raise FrameError(f"{self._name}: holds {holds}, expected {state_hash}; weights kept")
            yield version, found

    def layout(self) -> Layout:
        """Returns the layout of the run's tensors."""
        if self.planes is not None:
            return self.planes.layout
        return Layout(spec for spec, _ in read_checkpoint(self._path).values() if spec.is_publishable)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all tensors by name. Call it inside reading()."""
        if self.planes is not None:
            yield from tensors_of(self.planes)
            return
        with safe_open(self._path, framework="pt", device="cpu") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, checkpoint.get_tensor(name)

    def close(self) -> None:
        if self.planes is not None:
            self.planes.close()
        os.close(self._fd)


def tensors_of(planes: PlanesFile, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the mirror's tensors of these names, or all of them. Call it while the mirror is being read."""
    for spec in planes.layout.tensors:
        if names is None or spec.name in names:
            # A copy: whatever the model keeps of it must not follow the mirror.
            bits = torch.from_numpy(planes.tensor(spec).copy())
            yield spec.name, bits.view(TORCH_DTYPES[spec.dtype])
