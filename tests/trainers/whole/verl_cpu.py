"""The processor as a platform of verl, which has none: FSDP2 over gloo, and GPUs that only Ray believes in.

verl imports it in all its processes (``VERL_USE_EXTERNAL_MODULES``) and takes it by ``VERL_PLATFORM=cpu``.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device(ModuleType):
    """torch.cpu with what verl asks of an accelerator's module: its memory, of which it says nothing."""

    is_available = staticmethod(lambda: False)
    synchronize = staticmethod(torch.cpu.synchronize)
    mem_get_info = staticmethod(lambda *_: (0, 0))
    get_device_name = staticmethod(lambda *_: "CPU")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The processor."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = _Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        """Begins the process group, ahead of verl: it would name a backend for "cpu" twice, which torch
        refuses."""
        if "RANK" in os.environ and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        """What Ray counts for each training process. verl looks for GPUs and NPUs alone."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
