"""Safetensors files, as raw bits.

Owns: writing the full weights of a version for a worker to load, reading a checkpoint's bits.
Promises: the file holds exactly the layout's tensors and dtypes, and appears under its name only when
complete. Never imports torch, never converts a value.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import FrameError
from rose.transfer.layout import DTYPE_BYTES, Layout, TensorSpec
from rose.transfer.planes import WeightPlanes, bits_dtype
from rose.transfer.state_hash import StateHash


def write_checkpoint(path: Path, planes: WeightPlanes, metadata: Mapping[str, str]) -> None:
    """Writes all tensors to `path`, replacing it at once. Raises: OSError, e.g. when the disk is full."""
    # The widest elements first, so that each plane starts at a multiple of its element's width.
    order = sorted(planes.planes, key=lambda dtype: (-DTYPE_BYTES[dtype], dtype))
    head = json.dumps(_header(planes.layout, order, metadata), separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for dtype in order:
                file.write(planes.planes[dtype].view(np.uint8).data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> dict[str, tuple[TensorSpec, NDArray[np.uint8]]]:
    """Every tensor's spec and raw bytes, mapped, of one file or of all *.safetensors in a folder.

    Raises: FrameError on a file that is no safetensors file; OSError when it can't be read.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors: dict[str, tuple[TensorSpec, NDArray[np.uint8]]] = {}
    for file in files:
        tensors.update(_read_file(file))
    return tensors


def fill_from_checkpoint(planes: WeightPlanes, path: Path) -> None:
    """Loads a checkpoint's bits into the planes.

    Raises: FrameError when a tensor is missing or has another dtype or shape.
    """
    tensors = read_checkpoint(path)
    for bucket in planes.layout.buckets:
        bits = np.empty(bucket.num_elements, bits_dtype(bucket.dtype))
        for piece in planes.layout.pieces(bucket):
            if piece.tensor.name not in tensors:
                raise FrameError(f"{path}: no tensor {piece.tensor.name}")
            spec, raw = tensors[piece.tensor.name]
            if spec != piece.tensor:
                raise FrameError(f"{path}: {spec} is not the published {piece.tensor}")
            width = DTYPE_BYTES[spec.dtype]
            piece_bytes = raw[piece.begin * width : piece.end * width]
            bits[piece.at : piece.at + piece.end - piece.begin] = np.frombuffer(piece_bytes, bits.dtype)
        planes.fill(bucket, bits)


def checkpoint_state_hash(path: Path) -> StateHash:
    """The state hash of the tensors in a checkpoint: what a worker compares with the publisher's.

    Reads it piece by piece and keeps nothing: the worker may have no memory for a second copy.
    """
    tensors = read_checkpoint(path)
    layout = Layout(spec for spec, _ in tensors.values())
    total = StateHash()
    for bucket in layout.buckets:
        for piece in layout.pieces(bucket):
            width = DTYPE_BYTES[bucket.dtype]
            raw = tensors[piece.tensor.name][1][piece.begin * width : piece.end * width]
            # Copied, as a tensor may lie unaligned in its file.
            bits = np.frombuffer(raw.tobytes(), bits_dtype(bucket.dtype))
            total += StateHash.of(bits, bucket.first_index + piece.at)
    return total


def _header(layout: Layout, order: list[str], metadata: Mapping[str, str]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for dtype in order:
        for tensor in (tensor for tensor in layout.tensors if tensor.dtype == dtype):
            header[tensor.name] = {
                "dtype": dtype,
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.num_bytes],
            }
            at += tensor.num_bytes
    return header


def _read_file(path: Path) -> dict[str, tuple[TensorSpec, NDArray[np.uint8]]]:
    raw: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
    size = int.from_bytes(raw[:8].tobytes(), "little")
    if size + 8 > raw.size:
        raise FrameError(f"{path}: header of {size} bytes in a file of {raw.size}")
    try:
        header = json.loads(raw[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            spec = TensorSpec(name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]))
            begin, end = entry["data_offsets"]
            data = raw[8 + size + begin : 8 + size + end]
            if data.size != spec.num_bytes:
                raise FrameError(f"{path}: {name} has {data.size} bytes, its shape needs {spec.num_bytes}")
            tensors[name] = (spec, data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FrameError(f"{path}: not a safetensors file: {error!r}") from error
    return tensors
