"""Safetensors files, as raw bits.

Owns reading a checkpoint's headers and bits, and their state hash. Never imports torch, never converts a
value.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import FrameError
from rose.transfer.format.codec import Bits
from rose.transfer.format.layout import DTYPE_BYTES, Extent, Layout, TensorSpec
from rose.transfer.format.planes import WeightPlanes, bits_dtype
from rose.transfer.format.state_hash import StateHash


def read_checkpoint(path: Path) -> dict[str, tuple[TensorSpec, NDArray[np.uint8]]]:
    """Returns every tensor's spec and raw bytes, mapped, from one file or from all *.safetensors in a folder.
    Specs that can't be published are among them.

    Raises: FrameError on a file that is no safetensors file; OSError when it can't be read.
    """
    tensors: dict[str, tuple[TensorSpec, NDArray[np.uint8]]] = {}
    for file in _files(path):
        tensors.update(_read_file(file))
    return tensors


def read_dtypes(path: Path) -> dict[str, tuple[str, int]]:
    """Returns every tensor's safetensors dtype and its number of bytes, as the headers have them. Dtypes that
    can't be published are among them.

    Raises: FrameError on a file that is no safetensors file; OSError when it can't be read.
    """
    found: dict[str, tuple[str, int]] = {}
    for file in _files(path):
        header, _ = _read_header(file)
        try:
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                found[name] = (str(entry["dtype"]), int(end) - int(begin))
        except (ValueError, KeyError, TypeError) as error:
            raise FrameError(f"{file}: not a safetensors file: {error!r}") from error
    return found


def fill_from_checkpoint(planes: WeightPlanes, path: Path) -> None:
    """Loads a checkpoint's bits into the buckets that the planes hold.

    Raises: FrameError when a tensor is missing or has another dtype or shape.
    """
    tensors = read_checkpoint(path)
    for bucket in (planes.layout.buckets[index] for index in sorted(planes.held)):
        bits = np.empty(bucket.num_elements, bits_dtype(bucket.dtype))
        for piece in planes.layout.pieces(bucket):
            if piece.tensor.name not in tensors:
                raise FrameError(f"{path}: no tensor {piece.tensor.name}")
            spec, raw = tensors[piece.tensor.name]
            if spec != piece.tensor:
                raise FrameError(f"{path}: {spec} is not the published {piece.tensor}")
            bits[piece.at : piece.at + piece.end - piece.begin] = _bits_of(piece, raw)
        planes.fill(bucket, bits)


def checkpoint_state_hash(path: Path) -> StateHash:
    """Returns the state hash of a checkpoint's tensors, which a worker compares with the publisher's. Those
    that can't be published are left out.

    Reads piece by piece and keeps nothing, because the worker may have no memory for a second copy. Raises:
    FrameError, OSError.
    """
    tensors = read_checkpoint(path)
    layout = Layout(spec for spec, _ in tensors.values() if spec.is_publishable)
    total = StateHash()
    for bucket in layout.buckets:
        for piece in layout.pieces(bucket):
            bits = _bits_of(piece, tensors[piece.tensor.name][1])
            total += StateHash.of(bits, bucket.first_index + piece.at)
    return total


def _bits_of(piece: Extent, raw: NDArray[np.uint8]) -> Bits:
    """Copies a piece's elements out of its tensor's raw bytes, which may lie unaligned in the file."""
    width = DTYPE_BYTES[piece.tensor.dtype]
    if piece.part.is_whole:
        return np.frombuffer(
            raw[piece.begin * width : piece.end * width].tobytes(), bits_dtype(piece.tensor.dtype)
        )
    tensor = raw.view(bits_dtype(piece.tensor.dtype)).reshape(piece.tensor.shape)
    return np.array(piece.part.of(tensor).reshape(-1)[piece.begin : piece.end])


def _read_file(path: Path) -> dict[str, tuple[TensorSpec, NDArray[np.uint8]]]:
    """Returns the tensors of one file, mapped."""
    header, size = _read_header(path)
    raw: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
    try:
        tensors = {}
        for name, entry in header.items():
            spec = TensorSpec(name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]))
            begin, end = entry["data_offsets"]
            data = raw[size + begin : size + end]
            if data.size != spec.num_bytes:
                raise FrameError(f"{path}: {name} has {data.size} bytes, its shape needs {spec.num_bytes}")
            tensors[name] = (spec, data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FrameError(f"{path}: not a safetensors file: {error!r}") from error
    return tensors


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the entries of one file's tensors, and the place where their data begins."""
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        size = int.from_bytes(file.read(8), "little")
        if size + 8 > num_bytes:
            raise FrameError(
                f"{path}: not a safetensors file: header of {size} bytes in a file of {num_bytes}"
            )
        try:
            header: dict[str, Any] = json.loads(file.read(size))
            header.pop("__metadata__", None)
        except (ValueError, TypeError, AttributeError) as error:
            raise FrameError(f"{path}: not a safetensors file: {error!r}") from error
    return header, size + 8


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
