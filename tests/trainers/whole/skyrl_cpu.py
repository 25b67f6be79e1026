"""The processor in place of the GPUs that SkyRL's FSDP workers ask for: gloo, and GPUs that only Ray counts.

install() runs in each of Ray's processes before SkyRL is imported there (``worker_process_setup_hook``).
What it replaces, by places in SkyRL 0.4:

- the current device: skyrl/backends/skyrl_train/workers/worker.py:1090 and others
- the process group and its meshes: skyrl/backends/skyrl_train/workers/worker.py:125 and 135, and
  skyrl/backends/skyrl_train/distributed/fsdp_utils.py:256
- copies of buffers to "cuda": skyrl/backends/skyrl_train/distributed/fsdp_utils.py:125
- waiting for the device: skyrl/backends/skyrl_train/distributed/fsdp_strategy.py:109 and 132
- the import of flash-attn, which nothing here calls:
  skyrl/backends/skyrl_train/workers/model_wrapper.py:13
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NUM_GPUS = 2
ENVIRONMENT = "even-words"


def install() -> None:
    _replace_torchs()
    stand_in_for_flash_attn()
    import skyrl_gym

    skyrl_gym.register(id=ENVIRONMENT, entry_point="tests.trainers.whole.skyrl_words:EvenWords")


def stand_in_for_flash_attn() -> None:
    """Lets SkyRL's workers be imported."""
    for name in ("flash_attn", "flash_attn.bert_padding"):
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.pad_input = module.unpad_input = None
        sys.modules[name] = module


def _replace_torchs() -> None:
    import torch
    import torch._dynamo  # it looks up torch's functions by their names, and must find torch's own
    import torch.distributed.device_mesh as meshes

    torch_any: Any = torch
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = cuda.synchronize = lambda *_: None
    torch_any.Tensor.cuda = lambda self: self
    new_tensor, new_mesh = torch.empty, meshes.init_device_mesh
    new_group = torch.distributed.init_process_group

    def empty(*size: Any, device: Any = None, **kwargs: Any) -> Any:
        return new_tensor(*size, device="cpu" if device == "cuda" else device, **kwargs)

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return new_mesh("cpu", *args, **kwargs)

    def init_process_group(*_: Any, backend: str, **kwargs: Any) -> None:
        new_group("gloo", **kwargs)

    torch_any.empty = empty
    meshes.init_device_mesh = init_device_mesh
    torch_any.distributed.init_process_group = init_process_group
