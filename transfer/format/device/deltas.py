"""The delta codec where the tensors lie: compares, compacts and applies on a CUDA device.

Owns the choice between the processor and the device (device_deltas), and the buffers of a call; the kernels
are kernels.py's. The result is the same rose._delta.Delta that the processor makes, with the bits and hashes
of csrc/delta/sparse.hpp, so every codec's bytes are the same. Only the changes cross to the host. Imports
torch only when there are kernels. ROSE runs without them.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from rose import _delta
from rose.errors import install_hint
from rose.transfer.format.device.kernels import WIDTHS, DeviceKernels, device_kernels

logger = logging.getLogger(__name__)

Lanes = tuple[int, int]

_BLOCK = 65536
_GROUP = 32
_RUN = 2048
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def device_deltas(device: Any) -> "DeviceDeltas | None":
    """Returns the codec on a CUDA device where the kernels can be compiled; None: use the processor's
    (format/codec.py).

    For weights on a CUDA device, the log says which one was chosen.
    """
    if device is None or device.type != "cuda":
        return None
    try:
        kernels = device_kernels(device.index if device.index is not None else 0)
    except ImportError as error:
        logger.info(
            "codec=processor: weights are on %s, but cuda-python is missing (%s); %s",
            *(device, error, install_hint("cuda")),
        )
        return None
    except RuntimeError as error:
        logger.warning("codec=processor: weights are on %s, but its kernels can't be made: %s", device, error)
        return None
    logger.info("codec=%s: kernels compiled", device)
    return DeviceDeltas(kernels)


class DeviceDeltas:
    """Calls the kernels. Tensors are contiguous vectors on one device, read as raw bits; calls run on its
    current stream."""

    def __init__(self, kernels: DeviceKernels) -> None:
        import torch

        self._torch = torch
        self._kernels = kernels

    def zeros(self, size: int, width: int, device: Any) -> Any:
        """Returns a vector that these calls accept. Raises: MemoryError."""
        torch = self._torch
        dtypes = {
            1: torch.uint8,
            2: torch.int16,
            4: torch.int32,
        }  # few operations support wider unsigned types
        try:
            return torch.zeros(size, dtype=dtypes[width], device=device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{size * width} bytes on {device}: {error}") from error

    def between(self, old: Any, new: Any, first_index: int) -> tuple[_delta.Delta, Lanes]:
        """Does what rose._delta.Delta.between() does, for tensors. Raises: ValueError, RuntimeError."""
        size, width = self._require_vector(old), old.element_size()
        if (self._require_vector(new), new.element_size(), new.device) != (size, width, old.device):
            raise ValueError(f"old has {size} elements of {width} bytes on {old.device}, new is {new.shape}")
        with self._on(old.device):
            return self._between(old, new, first_index, size, width)

    def _between(
        self, old: Any, new: Any, first_index: int, size: int, width: int
    ) -> tuple[_delta.Delta, Lanes]:
        torch, device, num_runs = self._torch, old.device, -(-size // _RUN)
        masks = torch.empty(-(-size // _GROUP), dtype=torch.int32, device=device)
        counts = torch.zeros(-(-size // _BLOCK) * (_BLOCK // _RUN), dtype=torch.int32, device=device)
        stream = self._stream(device)
        both = (width, old.data_ptr(), new.data_ptr(), size)
        self._kernels.mark(*both, masks.data_ptr(), counts.data_ptr(), stream)
        ends = torch.cumsum(counts, 0, dtype=torch.int64)
        offsets = ends - counts
        num_changed = int(ends[-1]) if num_runs > 0 else 0
        places = torch.empty(num_changed, dtype=torch.int16, device=device)
        differences = torch.empty(num_changed * width, dtype=torch.uint8, device=device)
        change = torch.zeros(2, dtype=torch.int64, device=device)
        buffers = (masks, offsets, places, differences, change)
        addresses = [buffer.data_ptr() for buffer in buffers]
        self._kernels.compact(*both, first_index, addresses, stream)
        delta = _delta.Delta.from_parts(
            counts.view(-1, _BLOCK // _RUN).sum(1).cpu().numpy().astype(np.uint32),
            places.cpu().numpy().view(np.uint16),
            differences.cpu().numpy().view(_BITS[width]),
            size,
        )
        return delta, _lanes(change)

    def apply(self, delta: _delta.Delta, base: Any, first_index: int) -> Lanes:
        """Does what rose._delta.Delta.apply() does, to a tensor. Raises: ValueError, RuntimeError."""
        return self._add(delta, base, first_index, is_reverse=False)

    def revert(self, delta: _delta.Delta, base: Any, first_index: int) -> Lanes:
        """Undoes apply()."""
        return self._add(delta, base, first_index, is_reverse=True)

    def wait(self, device: Any) -> None:
        """Returns when the calling thread's stream has finished, so that other threads' streams may
        continue.
        """
        if device.type == "cuda":
            self._torch.cuda.current_stream(device).synchronize()

    def _add(self, delta: _delta.Delta, base: Any, first_index: int, *, is_reverse: bool) -> Lanes:
        size, width, device = self._require_vector(base), base.element_size(), base.device
        if (size, width) != (delta.num_elements, delta.width):
            raise ValueError(
                f"base has {size} elements of {width} bytes, "
                f"the difference {delta.num_elements} of {delta.width}"
            )
        counts, places, differences = delta.parts()
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        change = self._torch.zeros(2, dtype=self._torch.int64, device=device)
        parts = [
            self._torch.from_numpy(part.view(np.uint8)).to(device) for part in (starts, places, differences)
        ]
        addresses = [part.data_ptr() for part in parts]
        where = (width, base.data_ptr(), size, first_index)
        with self._on(device):
            self._kernels.add(*where, addresses, is_reverse, change.data_ptr(), self._stream(device))
        return _lanes(change)

    def _on(self, device: Any) -> AbstractContextManager[Any]:
        """Makes the tensors' device the calling thread's current one, where kernels start."""
        context: AbstractContextManager[Any] = (
            self._torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        )
        return context

    def _stream(self, device: Any) -> int:
        return self._torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

    @staticmethod
    def _require_vector(tensor: Any) -> int:
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"need a contiguous vector, got shape {tuple(tensor.shape)}")
        if tensor.element_size() not in WIDTHS:
            raise ValueError(f"elements must be 1, 2 or 4 bytes wide, got {tensor.element_size()}")
        return int(tensor.numel())


def _lanes(change: Any) -> Lanes:
    first, second = change.cpu().numpy().view(np.uint64).tolist()
    return first, second
