"""The delta codec where the tensors lie: compares, compacts and applies on a CUDA device.

Owns the choice between the processor and the device (device_deltas), the loading of the kernels' library
(csrc/delta/delta_cuda.h), and the buffers of a call. The result is the same rose._delta.Delta that the
processor makes, with the bits and hashes of csrc/delta/sparse.hpp, so every codec's bytes are the same; only
the changes cross to the host. Imports torch only when a library is loaded. ROSE builds and runs without it.
"""

import ctypes
import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from rose import _delta

logger = logging.getLogger(__name__)

Lanes = tuple[int, int]

_BLOCK = 65536
_GROUP = 32
_RUN = 2048
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def device_deltas(device: Any, library: Path) -> "DeviceDeltas | None":
    """Returns the codec on a CUDA device where the kernels are built; None: use the processor's
    (format/codec.py).

    For weights on a CUDA device, the log says which one was chosen.
    """
    if device is None or device.type != "cuda":
        return None
    try:
        deltas = DeviceDeltas(library)
    except OSError as error:
        logger.info(
            "codec=processor: weights are on %s, but its kernels (make cuda) don't load: %s", device, error
        )
        return None
    logger.info("codec=%s: kernels of %s", device, library)
    return deltas


class DeviceDeltas:
    """Calls the kernels. library: built from csrc/delta/delta_cuda.cu.

    Tensors are contiguous vectors on one device, read as raw bits; calls run on its current stream. Raises:
    OSError when the library can't be loaded.
    """

    def __init__(self, library: Path) -> None:
        import torch

        self._torch = torch
        self._calls = ctypes.CDLL(str(library))
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        for name, types in (
            ("rose_delta_mark", [ctypes.c_int, pointer, pointer, number, *3 * [pointer]]),
            ("rose_delta_compact", [ctypes.c_int, pointer, pointer, number, number, *6 * [pointer]]),
            ("rose_delta_add", [ctypes.c_int, pointer, number, number, *3 * [pointer], ctypes.c_int]),
        ):
            call = getattr(self._calls, name)
            call.restype = ctypes.c_char_p
            call.argtypes = types if name != "rose_delta_add" else [*types, pointer, pointer]

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
        self._check(self._calls.rose_delta_mark(*both, masks.data_ptr(), counts.data_ptr(), stream))
        ends = torch.cumsum(counts, 0, dtype=torch.int64)
        offsets = ends - counts
        num_changed = int(ends[-1]) if num_runs > 0 else 0
        places = torch.empty(num_changed, dtype=torch.int16, device=device)
        differences = torch.empty(num_changed * width, dtype=torch.uint8, device=device)
        change = torch.zeros(2, dtype=torch.int64, device=device)
        buffers = (masks, offsets, places, differences, change)
        addresses = [buffer.data_ptr() for buffer in buffers]
        self._check(self._calls.rose_delta_compact(*both, first_index, *addresses, stream))
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
            stream = self._stream(device)
            self._check(self._calls.rose_delta_add(*where, *addresses, is_reverse, change.data_ptr(), stream))
        return _lanes(change)

    def _on(self, device: Any) -> AbstractContextManager[Any]:
        """Makes the tensors' device the calling thread's current one, where kernels start."""
        context: AbstractContextManager[Any] = (
            self._torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        )
        return context

    def _stream(self, device: Any) -> int | None:
        return self._torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None

    @staticmethod
    def _require_vector(tensor: Any) -> int:
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"need a contiguous vector, got shape {tuple(tensor.shape)}")
        return int(tensor.numel())

    @staticmethod
    def _check(error: bytes | None) -> None:
        if error is not None:
            raise RuntimeError(f"delta kernels: {error.decode()}")


def _lanes(change: Any) -> Lanes:
    first, second = change.cpu().numpy().view(np.uint64).tolist()
    return first, second
