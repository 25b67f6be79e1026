"""A router, a relay and a sharded model for these tests. ROLL, which opens a log file when it is imported, is
told where."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.rollout.conftest import start_router
from tests.scheduler.rollout.tiny_model import make_tiny_qwen3
from tests.transfer.relay_process import RelayProcess

__all__ = ["start_router"]

_LOGS = tempfile.TemporaryDirectory(prefix="rose-test-roll-")
os.environ.setdefault("ROLL_LOG_DIR", _LOGS.name)


@pytest.fixture
def relay_url() -> Iterator[str]:
    process = RelayProcess("embedded")
    yield process.url
    process.stop()


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    """A model that FSDP2 has sharded in a world of one rank, because a rank more needs a process more."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    made = AutoModelForCausalLM.from_pretrained(make_tiny_qwen3(tmp_path / "model"), dtype=torch.float32)
    yield fully_shard(made, mesh=init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()
