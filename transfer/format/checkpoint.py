"""Safetensors files, as raw bits.

Owns writing the full weights of a version for a worker to load, and reading a checkpoint's bits. A file holds
exactly the layout's tensors and dtypes, and appears under its name only when it is complete. Never imports
torch, never converts a value.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rose.errors import FrameError, RelayError
from rose.transfer.format.codec import Bits
from rose.transfer.format.layout import DTYPE_BYTES, Layout, Piece, TensorSpec
from rose.transfer.format.manifest import LayoutBody, unpack_body
from rose.transfer.format.planes import WeightPlanes, bits_dtype
from rose.transfer.format.state_hash import StateHash

_LAYOUT_KEY = "rose_layout"
_HELD_KEY = "rose_buckets"


def write_checkpoint(path: Path, planes: WeightPlanes, metadata: Mapping[str, str]) -> None:
    """Writes all tensors to `path`, replacing the file atomically. Raises: OSError with the numbers when the
    disk is full.

    Where the planes hold a part of the weights, the rest are holes: zeros that take no memory. The file's
    metadata then names the layout and the buckets that its state hash covers.
    """
    # The widest elements first, so that each plane starts at a multiple of its element's width.
    order = sorted(planes.planes, key=lambda dtype: (-DTYPE_BYTES[dtype], dtype))
    if planes.layout.cuts:
        metadata = {**metadata, **_describe_shards(planes)}
    header = _header(planes.layout, order, metadata)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb+") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            if planes.layout.cuts:
                file.truncate(8 + len(head) + planes.layout.num_bytes)
                _reserve_shards(file.fileno(), 8 + len(head), header, planes)
            else:
                for dtype in order:
                    file.write(planes.planes[dtype].view(np.uint8).data)
        if planes.layout.cuts:
            _fill_shards(partial, planes)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)  # before the free space is measured
        room = shutil.disk_usage(path.parent)
        reason = (
            f"{error.strerror}: {planes.layout.num_bytes} bytes of weights, {room.free} of {room.total} free"
        )
        raise OSError(error.errno, reason, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def _describe_shards(planes: WeightPlanes) -> dict[str, str]:
    held = ",".join(str(index) for index in sorted(planes.held))
    return {_LAYOUT_KEY: LayoutBody.of(planes.layout).model_dump_json(), _HELD_KEY: held}


def _reserve_shards(file: int, data_at: int, header: Mapping[str, Any], planes: WeightPlanes) -> None:
    """Allocates the file's memory for what is held, from the first to the last held byte of each tensor.

    A full disk is reported here; a write to a mapped hole would end the process instead.
    """
    for part in planes.held_parts():
        inner = math.prod(part.tensor.shape[part.dim + 1 :])
        begin, end = part.start * inner, part.tensor.num_elements
        if not part.is_whole:
            end -= (part.tensor.shape[part.dim] - part.stop) * inner
        if begin < end:
            width = DTYPE_BYTES[part.tensor.dtype]
            at = data_at + header[part.tensor.name]["data_offsets"][0] + begin * width
            os.posix_fallocate(file, at, (end - begin) * width)


def _fill_shards(path: Path, planes: WeightPlanes) -> None:
    """Writes what the planes hold into the tensors of a file."""
    tensors = _read_file(path, mode="r+")[0]
    planes.read_into(
        {
            name: raw.view(bits_dtype(spec.dtype)).reshape(spec.shape)
            for name, (spec, raw) in tensors.items()
            if spec.num_elements > 0
        }
    )


def read_checkpoint(path: Path) -> dict[str, tuple[TensorSpec, NDArray[np.uint8]]]:
    """Returns every tensor's spec and raw bytes, mapped, from one file or from all *.safetensors in a folder.

    Raises: FrameError on a file that is no safetensors file; OSError when it can't be read.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors: dict[str, tuple[TensorSpec, NDArray[np.uint8]]] = {}
    for file in files:
        tensors.update(_read_file(file)[0])
    return tensors


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
    """Returns the state hash of a checkpoint's tensors, which a worker compares with the publisher's.

    For a staged file that holds shards, this is the hash of what it holds. Reads piece by piece and keeps
    nothing, because the worker may have no memory for a second copy. Raises: FrameError, OSError.
    """
    layout, held = None, None
    if path.is_dir():
        tensors = read_checkpoint(path)
    else:
        tensors, metadata = _read_file(path)
        if _LAYOUT_KEY in metadata:
            layout, held = _read_shards(path, metadata)
    layout = layout if layout is not None else Layout(spec for spec, _ in tensors.values())
    total = StateHash()
    for bucket in layout.buckets:
        if held is not None and bucket.index not in held:
            continue
        for piece in layout.pieces(bucket):
            bits = _bits_of(piece, tensors[piece.tensor.name][1])
            total += StateHash.of(bits, bucket.first_index + piece.at)
    return total


def _read_shards(path: Path, metadata: Mapping[str, str]) -> tuple[Layout, frozenset[int]]:
    try:
        layout = unpack_body(metadata[_LAYOUT_KEY].encode(), LayoutBody, str(path)).to_layout()
        return layout, frozenset(int(index) for index in metadata[_HELD_KEY].split(",") if index)
    except (RelayError, KeyError, ValueError) as error:
        raise FrameError(f"{path}: its metadata holds no layout of shards: {error}") from error


def _bits_of(piece: Piece, raw: NDArray[np.uint8]) -> Bits:
    """Copies a piece's elements out of its tensor's raw bytes, which may lie unaligned in the file."""
    width = DTYPE_BYTES[piece.tensor.dtype]
    if piece.part.is_whole:
        return np.frombuffer(
            raw[piece.begin * width : piece.end * width].tobytes(), bits_dtype(piece.tensor.dtype)
        )
    tensor = raw.view(bits_dtype(piece.tensor.dtype)).reshape(piece.tensor.shape)
    return np.array(piece.part.of(tensor).reshape(-1)[piece.begin : piece.end])


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


def _read_file(
    path: Path, mode: Literal["r", "r+"] = "r"
) -> tuple[dict[str, tuple[TensorSpec, NDArray[np.uint8]]], dict[str, str]]:
    """Returns the tensors of one file, mapped, and its metadata."""
    raw: NDArray[np.uint8] = np.memmap(path, np.uint8, mode=mode)
    size = int.from_bytes(raw[:8].tobytes(), "little")
    if size + 8 > raw.size:
        raise FrameError(f"{path}: not a safetensors file: header of {size} bytes in a file of {raw.size}")
    try:
        header = json.loads(raw[8 : 8 + size].tobytes())
        metadata = header.pop("__metadata__", {})
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
    return tensors, metadata
