"""Live torch tensors as raw bits: a trainer's, which are read, and a rollout rank's, which are written.

Owns the weights that a trainer hands over. Imports torch only when a source is made or bits are loaded. A
tensor that several names share is published once, under its first name. Integers of eight bytes, such as
position ids, are left out: training does not change them, and engines keep their own. Torch casts wider
floats (round to nearest even) on their device, before they are copied to the host. Never keeps a copy of the
weights, and writes to a trainer's only in load().
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rose.transfer.format.codec import Bits
from rose.transfer.format.layout import Bucket, Extent, Layout, TensorSpec
from rose.transfer.format.planes import WeightPlanes, bits_dtype
from rose.transfer.format.shard_plan import Box

logger = logging.getLogger(__name__)

_SAFETENSORS_NAMES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "bool": "BOOL",
}
_CASTS = ("bfloat16", "float16", "float32")
_LEFT_OUT = ("int64", "uint64")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """A trainer rank's part of a tensor, and its place in the Hugging Face tensor.

    tensor: the live parameter or a view of it, not a copy; of a DTensor, its local part counts. index: which
    of these elements are the part; None: all. shape: that of the whole tensor. keeps_dtype: whether it is
    never cast.
    """

    tensor: Any
    shape: tuple[int, ...]
    start: tuple[int, ...]
    keeps_dtype: bool = False
    index: tuple[Any, ...] | None = None

    @property
    def part(self) -> Any:
        """The part itself. It is cut again each time, because a module that goes to another device gives its
        parameters other memory."""
        held = self.tensor.detach().to_local() if _is_distributed(self.tensor) else self.tensor
        return held if self.index is None else held.detach()[self.index]

    @property
    def box(self) -> Box:
        stop = tuple(at + size for at, size in zip(self.start, self.part.shape, strict=True))
        return Box(start=self.start, stop=stop)

    def region(self, ends: tuple[tuple[int, int], ...]) -> Any:
        """Returns a region of the whole tensor, in place; it must lie in this shard."""
        slices = [slice(a - at, b - at) for at, (a, b) in zip(self.start, ends, strict=True)]
        return self.part.detach()[tuple(slices)]


class TorchSource:
    """Tensors by their Hugging Face names, from a module or from (name, tensor) pairs.

    weights: anything with state_dict(), a mapping, or pairs; its values are tensors, DTensors (FSDP2) or
    TensorShards. Pairs may name a tensor several times, for several shards. They are read at each publish, so
    an optimizer that updates them in place needs nothing else. dtype: floats of 2 bytes or more are cast to
    it; None publishes them unchanged.
    """

    def __init__(self, weights: Any, dtype: str | None) -> None:
        import torch

        if dtype is not None and dtype not in _CASTS:
            raise ValueError(f"dtype {dtype!r} is none of {', '.join(_CASTS)}")
        self._torch = torch
        self._cast = getattr(torch, dtype) if dtype is not None else None
        self._shards = _published(_untied(named_tensors(weights)))
        self._formats = self._read_formats()
        self._scratch = threading.local()
        self._views = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}

    def specs(self) -> list[TensorSpec]:
        """Returns the specs of what is published. Raises: ValueError on a dtype that can't be published."""
        return [
            TensorSpec(name=name, dtype=self._wire_dtype(name, shards[0]), shape=shards[0].shape)
            for name, shards in self._shards.items()
        ]

    def named_shards(self) -> Iterator[tuple[str, TensorShard]]:
        """Yields what this process holds, each with its tensor's name."""
        return ((name, shard) for name, shards in self._shards.items() for shard in shards)

    def holdings(self) -> dict[str, list[Box]]:
        """Returns the regions of each tensor that this process holds."""
        return {name: [shard.box for shard in shards] for name, shards in self._shards.items()}

    def require_same(self) -> None:
        """Raises: ValueError when a tensor no longer has the shape and dtype with which the run began."""
        for (name, was), (_, now) in zip(self._formats, self._read_formats(), strict=True):
            if now != was:
                raise ValueError(f"tensor {name} is {now}, the run began with {was}: begin a new run")

    def _read_formats(self) -> list[tuple[str, str]]:
        """Returns the name of each shard's tensor, and the form in which it would be published."""
        return [
            (name, f"{self._wire_dtype(name, shard)} {tuple(shard.part.shape)}")
            for name, shard in self.named_shards()
        ]

    def device(self) -> Any:
        """Returns the device that all tensors lie on; None if they lie on several."""
        devices = self._devices()
        return next(iter(devices)) if len(devices) == 1 else None

    def _devices(self) -> set[Any]:
        return {shard.part.device for _, shard in self.named_shards()}

    def prepare(self) -> None:
        """Returns when the calling thread's streams have finished with the weights, so that any thread may
        read them.
        """
        for device in self._devices():
            if device.type == "cuda":
                self._torch.cuda.current_stream(device).synchronize()

    def read(self, layout: Layout, bucket: Bucket) -> list[Bits]:
        """Returns the present bits of the bucket's elements, piece by piece, valid until the thread's next
        read().

        Pieces that lie in host memory in their published form are not copied. Others are copied into the same
        memory each time; otherwise the kernel would have to clear 64 MB of new pages for each bucket. Raises:
        ValueError when not all elements are here.
        """
        dtype = bits_dtype(bucket.dtype)
        num_bytes = bucket.num_elements * dtype.itemsize
        memory = getattr(self._scratch, "memory", None)
        if memory is None or memory.size < num_bytes:
            memory = self._scratch.memory = np.empty(num_bytes, np.uint8)
        scratch = memory[:num_bytes].view(dtype)
        pieces: list[Bits] = []
        for piece, region, target in self._regions(layout, bucket):
            flat = region.reshape(-1)[piece.begin : piece.end]
            bits: Bits = self._raw(flat, target, dtype.itemsize).cpu().numpy()
            if region.device.type != "cpu" or target is not None or not region.is_contiguous():
                copied = scratch[piece.at : piece.at + bits.size]
                copied[:] = bits
                bits = copied
            pieces.append(bits)
        return pieces

    def gather(self, layout: Layout, bucket: Bucket, bits: Any) -> None:
        """Copies the present bits of the bucket's elements into a vector of integers on their device.

        bits: the vector, whose integers have the elements' width. Nothing crosses to the host. Raises:
        ValueError when not all elements are here.
        """
        for piece, region, target in self._regions(layout, bucket):
            flat = region.reshape(-1)[piece.begin : piece.end]
            raw = self._raw(flat, target, bits.element_size()).view(bits.dtype)
            bits[piece.at : piece.at + flat.numel()].copy_(raw)

    def load(self, planes: WeightPlanes) -> None:
        """Writes what whole planes hold into the tensors, in place. Wider floats get the published values."""
        torch = self._torch
        parts = planes.layout.parts_by_tensor
        with torch.no_grad():
            for name, shards in self._shards.items():
                target = self._target(shards[0])
                dtype = target if target is not None else shards[0].tensor.dtype
                whole = torch.empty(shards[0].shape, dtype=dtype)
                bits = whole.view(self._views[whole.element_size()]).numpy()
                for part in parts[name]:
                    planes.read_part_into(part, bits)
                for shard in shards:
                    ends = zip(shard.start, shard.part.shape, strict=True)
                    shard.part.copy_(whole[tuple(slice(at, at + size) for at, size in ends)])

    def _regions(self, layout: Layout, bucket: Bucket) -> Iterator[tuple[Extent, Any, Any]]:
        """Yields the bucket's pieces, each with the part of a tensor that it is cut from, and the dtype that
        this is cast to, if it is.
        """
        for piece in layout.pieces(bucket):
            ends = piece.part.box
            shards = self._shards.get(piece.tensor.name, [])
            shards = [shard for shard in shards if Box.of(ends).lies_in(shard.box)]
            if not shards:
                raise ValueError(f"no shard holds {ends} of tensor {piece.tensor.name}")
            yield piece, shards[0].region(ends), self._target(shards[0])

    def _raw(self, flat: Any, target: Any, width: int) -> Any:
        cast = flat if target is None else flat.to(target)
        return cast.contiguous().view(self._views[width])

    def _target(self, shard: TensorShard) -> Any:
        """Returns the dtype that a shard is cast to; None if it is not cast."""
        tensor = shard.tensor
        is_cast = tensor.is_floating_point() and tensor.element_size() >= 2 and not shard.keeps_dtype
        return self._cast if is_cast and tensor.dtype != self._cast else None

    def _wire_dtype(self, name: str, shard: TensorShard) -> str:
        target = self._target(shard)
        dtype = str(target if target is not None else shard.tensor.dtype).removeprefix("torch.")
        if dtype not in _SAFETENSORS_NAMES:
            raise ValueError(
                f"tensor {name}: dtype {dtype} can't be published: publish it as one of "
                f"{', '.join(_SAFETENSORS_NAMES)}, or leave it out if training does not change it"
            )
        return _SAFETENSORS_NAMES[dtype]


def load_planes(planes: WeightPlanes, tensors: Mapping[str, Any]) -> None:
    """Copies what the planes hold into the tensors of the same names, in place.

    Raises: ValueError, before anything is written, unless each is there with its published shape and dtype.
    """
    import torch

    views = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
    copies: dict[str, Any] = {}
    for spec in planes.layout.tensors:
        if spec.name not in tensors:
            raise ValueError(f"no tensor {spec.name} among {len(tensors)} to load into")
        tensor = tensors[spec.name].detach()
        dtype = _SAFETENSORS_NAMES.get(str(tensor.dtype).removeprefix("torch."))
        if (dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise ValueError(f"tensor {spec.name} is {dtype} {tuple(tensor.shape)}, the published is {spec}")
        copies[spec.name] = tensor.cpu().contiguous()  # the same tensor if it is contiguous in host memory
    planes.read_into(
        {name: copy.view(views[copy.element_size()]).numpy() for name, copy in copies.items() if copy.numel()}
    )
    with torch.no_grad():
        for name, copy in copies.items():
            if copy.data_ptr() != tensors[name].data_ptr():
                tensors[name].copy_(copy)


def named_tensors(weights: Any) -> Iterable[tuple[str, Any]]:
    """Yields a trainer's tensors or shards, each with its name; those of a module are the live ones."""
    if hasattr(weights, "state_dict"):
        weights = weights.state_dict(keep_vars=True)
    pairs: Iterable[tuple[str, Any]] = weights.items() if isinstance(weights, Mapping) else weights
    return pairs


def _untied(pairs: Iterable[tuple[str, Any]]) -> dict[str, list[TensorShard]]:
    """Drops names whose tensor is, element for element, the storage of an earlier one."""
    kept: dict[str, list[TensorShard]] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, value in pairs:
        shard = shard_of(value)
        tensor = shard.part
        if tensor.numel() == 0 and shard.shape != tuple(tensor.shape):
            continue  # there are more ranks than rows, and other ranks have the rows
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() > 0 and place in seen:
            continue
        seen.add(place)
        kept.setdefault(name, []).append(shard)
    return kept


def _published(shards: dict[str, list[TensorShard]]) -> dict[str, list[TensorShard]]:
    """Leaves integers of eight bytes out. Raises: ValueError if nothing else is there."""
    dtypes = {name: str(parts[0].tensor.dtype).removeprefix("torch.") for name, parts in shards.items()}
    left_out = [name for name in shards if dtypes[name] in _LEFT_OUT]
    said = f"tensors of {' or '.join(_LEFT_OUT)} that are not published: {len(left_out)}"
    if len(left_out) == len(shards):
        raise ValueError(f"no tensors to publish; {said}")
    if left_out:
        logger.info("%s, first %s; engines keep their own", said, left_out[0])
    return {name: parts for name, parts in shards.items() if name not in left_out}


def shard_of(value: Any) -> TensorShard:
    """Returns this rank's part; of a DTensor (FSDP2, torch's tensor parallelism) the local part and its
    place.
    """
    if isinstance(value, TensorShard):
        return value
    shape = tuple(value.shape)
    if not _is_distributed(value):
        return TensorShard(tensor=value, shape=shape, start=(0,) * len(shape))
    (chunk,) = value.__create_chunk_list__()  # torch's own distributed checkpoints use it
    return TensorShard(tensor=value, shape=shape, start=tuple(chunk.offsets))


def _is_distributed(tensor: Any) -> bool:
    """Whether this is a DTensor. Its local part is another tensor when its module has moved."""
    return hasattr(tensor, "__create_chunk_list__")
