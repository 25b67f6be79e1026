"""A trainer's weights, quantized to fp8 before they are published.

Owns the quantization, which rounds as vLLM's own does: fp8 numbers and scales are those that vLLM would make
of the same weights. Keeps what was quantized beside the weights, on their device: a byte for each element.
Source of the rounding: vLLM 0.32, its online quantization to fp8 and per_block_cast_to_fp8(). Where we
differ: block scales are divided on every device, where vLLM multiplies by an inverse on CUDA, so trainers on
a processor and on a GPU publish the same bits.
"""

from pathlib import Path
from typing import Any

from rose.transfer.format.planes import WeightPlanes
from rose.transfer.publish.fp8_scheme import Fp8Checkpoint, Fp8Scheme
from rose.transfer.publish.published_dtypes import PublishedDtypes, as_published, require_checkpoint
from rose.transfer.publish.torch_source import TensorShard, TorchSource

_LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
_LEAST_BLOCK_AMAX = 1e-4
_ROW_AMAX_INVERSE = 512
"""vLLM's bounds, below which a scale no longer shrinks; the second one is of the inverse."""
_CHUNK_ELEMENTS, _DEVICE_CHUNK_ELEMENTS = 1 << 20, 64 << 20
"""Elements that are quantized at a time, which takes several copies of them in float32. On a processor with
16 Mi it takes four times as long, because the kernel clears new pages each time; a device has launches to
save."""


class QuantizedSource(TorchSource):
    """What a trainer publishes for engines with a checkpoint in fp8.

    checkpoint: tells by name which tensors are quantized, and how. dtype: floats are cast to it before they
    are quantized. A shard has to hold whole groups of elements that have a scale in common. Only where a
    whole tensor has one scale, and all of torch's ranks publish (num_ranks is the size of its world), the
    ranks find that scale together, in prepare(). Raises: ValueError where the tensors are not the
    checkpoint's.
    """

    def __init__(self, weights: Any, dtype: str | None, checkpoint: Path, num_ranks: int = 1) -> None:
        import torch

        found = Fp8Checkpoint(checkpoint)
        self._scheme = found.scheme
        self._trained = TorchSource(weights, dtype)
        self._shared = found.quantized_names if _is_of_torch_ranks(num_ranks, found.scheme) else ()
        """The tensors whose scales the ranks find together, in the order of all ranks."""
        self._quantized: list[tuple[str, TensorShard, Any, Any]] = []
        """Names and matrices of the trainer, with their fp8 numbers and their scales."""
        pairs: list[tuple[str, TensorShard]] = []
        with_scale: set[str] = set()
        for name, shard in self._trained.named_shards():
            spec = found.scales_of(name, shard.shape)
            if spec is None:
                pairs.append((name, shard))
                continue
            if not self._shared:
                _require_whole_groups(name, shard, self._scheme)
            matrix = shard.part
            numbers = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=matrix.device)
            num_scales = self._scheme.scales_of(tuple(matrix.shape))
            scales = torch.empty(num_scales, dtype=torch.float32, device=matrix.device)
            self._quantized.append((name, shard, numbers, scales))
            group = self._scheme.group_of(shard.shape)
            start = tuple(at // size for at, size in zip(shard.start, group, strict=True))
            pairs.append((name, TensorShard(tensor=numbers, shape=shard.shape, start=shard.start)))
            if self._shared and name in with_scale:
                continue  # another part of the tensor has brought it
            with_scale.add(name)
            if len(spec.shape) < 2:
                scales, start = scales.view(spec.shape), (0,) * len(spec.shape)
            pairs.append(
                (spec.name, TensorShard(tensor=scales, shape=spec.shape, start=start, keeps_dtype=True))
            )
        super().__init__(pairs, dtype)

    def require_same(self) -> None:
        self._trained.require_same()

    def prepare(self) -> None:
        """Quantizes the present weights, as the calling thread's streams leave them."""
        with self._torch.no_grad():
            shared = self._shared_amaxes() if self._shared else {}
            for name, shard, numbers, scales in self._quantized:
                quantize(self._scheme, shard.part.detach(), self._cast, numbers, scales, shared.get(name))
        super().prepare()

    def _shared_amaxes(self) -> dict[str, Any]:
        """Returns the largest number of each tensor over all ranks, which all have to call it."""
        from torch import distributed

        amaxes = self._torch.zeros(len(self._shared), device=reducing_device(self._trained.device()))
        places = {name: place for place, name in enumerate(self._shared)}
        for name, shard, _, _ in self._quantized:
            own = amaxes[places[name]]
            own.copy_(own.maximum(_amax(shard.part, self._cast).to(own.device)))
        distributed.all_reduce(amaxes, op=distributed.ReduceOp.MAX)
        return {name: amaxes[place] for name, place in places.items()}

    def load(self, planes: WeightPlanes) -> None:
        """Raises: ValueError always, because what was published is less exact than the trainer's weights."""
        raise ValueError("the published weights are quantized: load the trainer's own checkpoint instead")


def source_of(
    weights: Any,
    dtype: str | PublishedDtypes | None,
    quantized_like: str | Path | None,
    num_ranks: int = 1,
    checkpoint: str | Path | None = None,
    rank: int = 0,
) -> TorchSource:
    """Returns what a trainer publishes, quantized if there is a checkpoint that says how. checkpoint: the one
    that decides the dtypes, unless a quantized one does.

    Raises: ValueError as require_checkpoint() does; for ``checkpoint`` on rank 0 alone. On another rank it
    then counts as unknown: the ranks compare their dtypes, and all of them are told.
    """
    like = quantized_like if quantized_like is not None else checkpoint
    if like is not None and (rank == 0 or quantized_like is not None):
        require_checkpoint(like)
    found, cast = as_published(weights, dtype, like)
    if quantized_like is None:
        return TorchSource(found, cast)
    return QuantizedSource(found, cast, Path(quantized_like), num_ranks)


def _is_of_torch_ranks(num_ranks: int, scheme: Fp8Scheme) -> bool:
    """Whether all of torch's ranks publish, several of them, and a tensor has one scale."""
    from torch import distributed

    if scheme.kind != "tensor" or num_ranks == 1:
        return False
    has_world = distributed.is_available() and distributed.is_initialized()
    return has_world and distributed.get_world_size() == num_ranks


def reducing_device(device: Any) -> Any:
    """Returns where torch's ranks can reduce: on the weights' device, unless their group has no backend for
    it, as NCCL has none for the host's memory. None: the weights lie on several devices."""
    from torch import distributed

    torch_ranks = distributed.distributed_c10d
    can_stay = device is not None and device.type in torch_ranks._device_capability()
    return device if can_stay else torch_ranks._get_object_coll_device()


def _amax(matrix: Any, dtype: Any) -> Any:
    """Returns the largest absolute number of a matrix, which is cast to dtype unless that is None."""
    low, high = matrix.detach().aminmax()
    return low.abs().maximum(high.abs()).to(dtype if dtype is not None else matrix.dtype).float()


def quantize(scheme: Fp8Scheme, matrix: Any, dtype: Any, numbers: Any, scales: Any, amax: Any = None) -> None:
    """Writes the fp8 numbers and the scales of a matrix. dtype: cast to before; None: as it is. amax: the
    largest number of a whole tensor, of which the matrix is a part."""
    import torch

    dtype = dtype if dtype is not None else matrix.dtype
    # A tensor on the device: torch multiplies by the inverse of a Python number on CUDA.
    largest = torch.tensor(_LARGEST, device=matrix.device)
    if scheme.kind == "tensor":
        amax = amax.to(matrix.device) if amax is not None else _amax(matrix, dtype)
        scales.copy_((amax / largest).clamp_min(torch.finfo(torch.float32).tiny))
    rows, _ = scheme.group if scheme.group[0] else (1, 0)
    most = _CHUNK_ELEMENTS if matrix.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    step = rows * max(1, most // (rows * matrix.shape[1]))
    for begin in range(0, matrix.shape[0], step):
        part, made = (each[begin : begin + step] for each in (matrix, numbers))
        part = part.to(dtype)
        if scheme.kind == "tensor":
            made.copy_((part * (1.0 / scales)).clamp_(-_LARGEST, _LARGEST))
            continue
        own = scales[begin // rows :][: -(-part.shape[0] // rows)]
        if scheme.kind == "channel":
            _quantize_rows(part, made, own, largest)
        else:
            _quantize_blocks(part, made, own, largest, scheme.group)


def _quantize_rows(matrix: Any, numbers: Any, scales: Any, largest: Any) -> None:
    amax = matrix.abs().amax(dim=-1, keepdim=True).float()
    scales.copy_((amax / largest).clamp_min(1.0 / (largest * _ROW_AMAX_INVERSE)))
    numbers.copy_((matrix / scales).clamp_(-_LARGEST, _LARGEST))


def _quantize_blocks(matrix: Any, numbers: Any, scales: Any, largest: Any, block: tuple[int, int]) -> None:
    from torch.nn.functional import pad

    (num_rows, num_columns), (rows, columns) = matrix.shape, block
    padded = pad(matrix, (0, -num_columns % columns, 0, -num_rows % rows))
    blocks = padded.view(-1, rows, padded.shape[1] // columns, columns)
    amax = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(_LEAST_BLOCK_AMAX)
    made = amax / largest
    scales.copy_(made.view(scales.shape))
    numbers.copy_((blocks * (1.0 / made)).view_as(padded)[:num_rows, :num_columns])


def _require_whole_groups(name: str, shard: TensorShard, scheme: Fp8Scheme) -> None:
    """Raises: ValueError where elements with a scale in common lie on several trainer ranks."""
    group = scheme.group_of(shard.shape)
    box = shard.box
    for begin, end, whole, size in zip(box.start, box.stop, shard.shape, group, strict=True):
        if begin % size or (end % size and end != whole):
            raise ValueError(
                f"tensor {name}: this rank holds {list(box.start)} to {list(box.stop)} of "
                f"{list(shard.shape)}, and {group[0]} rows by {group[1]} columns have a scale in common: cut "
                "it between them"
            )
