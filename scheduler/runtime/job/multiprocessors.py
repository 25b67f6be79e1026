"""Shares of a GPU: some of its multiprocessors (SMs), by green contexts.

Owns this process's green contexts, and which stream is torch's current one in the thread that runs the
phases. What torch launches on that stream runs on the share's multiprocessors alone, backward passes as well.
Not confined: streams that the program or a library makes itself (NCCL's), and CUDA graphs that were captured
under another share. Two processes compute at once only as clients of one MPS server.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rose.errors import ConfigError, WorkerError, install_hint
from rose.scheduler.runtime.channel.messages import Shared

if TYPE_CHECKING:
    import torch


class Multiprocessors:
    """The multiprocessors of one GPU, numbered from 0. Makes no context before the first stream."""

    def __init__(self, device: int = 0) -> None:
        """Raises: ConfigError without cuda-python, a driver or a GPU; WorkerError if the driver has no green
        contexts, which it has from CUDA 12.4 on."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise ConfigError(f"cuda-python is not installed; {install_hint('cuda')}") from error
        self._driver: Any = driver
        try:
            status = driver.cuInit(0)[0]
        except RuntimeError as error:  # cuda-python loads libcuda.so.1 only now
            raise ConfigError(f"the CUDA driver can't be loaded ({error}); leave out --gpu") from error
        if status.value != 0:
            raise ConfigError(f"cuInit: {status.name}: this process sees no GPU; leave out --gpu")
        self._device = self._call("cuDeviceGet", device)
        self.name = self._call("cuDeviceGetName", 256, self._device).split(b"\0", 1)[0].decode()
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self._whole = self._call("cuDeviceGetDevResource", self._device, kind)
        self.num = int(self._whole.sm.smCount)
        self._streams: dict[tuple[bool, int], tuple[int, int]] = {}

    def stream(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Returns a stream whose kernels run on about these multiprocessors, and their exact number.

        ``numbers``: the first ones or the last ones of the GPU, ascending. The driver splits them in groups,
        so the first ones may be a few more, and the last ones as many fewer. With the same border, the two
        parts have none in common, in any process. The handle is the same in each call. Raises: ConfigError if
        the driver can't take so many apart; WorkerError.
        """
        is_first = numbers[0] == 0
        if not is_first and numbers[-1] != self.num - 1:
            raise ValueError(
                f"multiprocessors {numbers[0]} to {numbers[-1]} must begin at 0 or end at {self.num - 1}"
            )
        border = len(numbers) if is_first else numbers[0]
        if (is_first, border) not in self._streams:
            self._streams[is_first, border] = self._make(border, is_first=is_first)
        return self._streams[is_first, border]

    def _make(self, border: int, *, is_first: bool) -> tuple[int, int]:
        driver = self._driver
        status, first, num_groups, rest = driver.cuDevSmResourceSplitByCount(1, self._whole, 0, border)
        if status.value != 0 or num_groups < 1 or not rest.sm.smCount:
            raise ConfigError(
                f"the driver can't split {border} of the {self.num} multiprocessors of {self.name} off and "
                f"leave some ({status.name}); a GPU with more of them can be shared"
            )
        part = first[0] if is_first else rest
        description = self._call("cuDevResourceGenerateDesc", [part], 1)
        default = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        green = self._call("cuGreenCtxCreate", description, self._device, default)
        unordered = driver.CUstream_flags.CU_STREAM_NON_BLOCKING  # others are refused
        return int(self._call("cuGreenCtxStreamCreate", green, unordered, 0)), int(part.sm.smCount)

    def _call(self, name: str, *arguments: object) -> Any:
        needed = "green contexts need a driver of CUDA 12.4 or newer"
        try:
            status, *values = getattr(self._driver, name)(*arguments)
        except RuntimeError as error:  # an older driver has no such function
            raise WorkerError(f"{name}: {error}; {needed}") from error
        if status.value != 0:
            raise WorkerError(f"{name}: {status.name}; {needed}")
        return values[0] if len(values) == 1 else values


class GreenContexts:
    """Shares of GPU 0 of this process, for a program that computes with torch. A Device (share.py).

    Each switch waits, on the device, for what was launched before, so the program's order stays as it is.
    """

    def __init__(self) -> None:
        self._gpu: Multiprocessors | None = None
        self._whole: torch.cuda.Stream | None = None
        """The program's own stream, on which a share of the whole GPU runs."""

    def take(self, share: Shared) -> None:
        """Makes a stream of the share the current one of this thread. Raises: ConfigError; WorkerError."""
        import torch

        if not share.cores:  # a pause: what is not in use goes to the other job
            torch.cuda.empty_cache()
            return
        before = torch.cuda.current_stream(0)
        if self._gpu is None or self._whole is None:
            self._gpu, self._whole = Multiprocessors(), before
        stream = self._whole
        if len(share.cores) < self._gpu.num:
            handle, _ = self._gpu.stream(share.cores)
            stream = torch.cuda.ExternalStream(handle, 0)  # type: ignore[no-untyped-call]
        if stream != before:
            stream.wait_stream(before)
            torch.cuda.set_stream(stream)
        # torch keeps freed memory for the stream that had it, out of reach of other streams and processes.
        torch.cuda.empty_cache()

    def finish(self) -> None:
        """Waits until the GPU has done what this thread has launched."""
        if self._whole is not None:
            import torch

            torch.cuda.current_stream(0).synchronize()
