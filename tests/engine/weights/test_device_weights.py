"""What the weights of vLLM's layers take on the device, on processors that pack them and on others."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

import torch
from vllm import _custom_ops
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.platforms import current_platform

from rose.engine.weights.device_weights import device_bytes

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU platform packs weights")

NUM_OUTPUTS, NUM_INPUTS = 1024, 1024
"""Large enough for oneDNN: on processors with AMX vLLM packs smaller ones itself."""
NUM_ELEMENTS = NUM_OUTPUTS * NUM_INPUTS


@pytest.fixture(params=["as here", "without oneDNN"])
def _processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "as here":
        monkeypatch.setattr(_custom_ops, "_supports_onednn", False)


def dispatched(dtype: torch.dtype, *, is_weight_removed: bool) -> Any:
    """One layer, as vLLM makes it ready; an output head keeps its weight, others don't where it is packed."""
    layer = torch.nn.Linear(NUM_INPUTS, NUM_OUTPUTS, bias=False, dtype=dtype).requires_grad_(False)
    record_metadata_for_reloading(layer)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=is_weight_removed)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("_processor")
def test_a_layer_takes_its_weight_once_whether_it_is_packed_or_not(dtype: torch.dtype) -> None:
    layer = dispatched(dtype, is_weight_removed=True)
    assert device_bytes(layer) == NUM_ELEMENTS * dtype.itemsize


def test_a_head_takes_its_weight_and_the_packed_copy() -> None:
    if not _custom_ops._supports_onednn:
        pytest.skip("this vLLM is built without oneDNN")
    layer = dispatched(torch.float32, is_weight_removed=False)
    assert device_bytes(layer) == 2 * NUM_ELEMENTS * 4
    layer.cpu_linear = None
    assert device_bytes(layer) == NUM_ELEMENTS * 4


def test_a_head_that_is_not_packed_takes_its_weight_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    layer = dispatched(torch.float32, is_weight_removed=False)
    assert device_bytes(layer) == NUM_ELEMENTS * 4
    layer.cpu_linear = torch.nn.functional.linear  # vLLM's own choice for layers that it must not pack
    assert device_bytes(layer) == NUM_ELEMENTS * 4


def test_a_packed_copy_in_a_tensor_takes_what_its_storage_does_and_a_shared_one_nothing() -> None:
    """The kernels for AMX and for Zen keep theirs in these two ways."""
    layer = dispatched(torch.bfloat16, is_weight_removed=False)
    packed, num_outputs = torch.zeros(300, dtype=torch.float32), NUM_OUTPUTS
    layer.cpu_linear = lambda x, weight, bias: (packed, num_outputs)
    assert device_bytes(layer) == NUM_ELEMENTS * 2 + 1200
    shared = layer.weight.detach()
    layer.cpu_linear = lambda x, weight, bias: shared
    assert device_bytes(layer) == NUM_ELEMENTS * 2
