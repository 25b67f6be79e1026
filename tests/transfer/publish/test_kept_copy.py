"""The result is the same wherever a trainer's weights are compared."""

import numpy as np
import pytest
import torch
from host_kernels import HostKernels

from rose.transfer.format.device.deltas import DeviceDeltas
from rose.transfer.format.layout import Layout
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.publish.kept_copy import DeviceCopy, HostCopy, open_kept_copy
from rose.transfer.publish.torch_source import TorchSource

CPU = torch.device("cpu")


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "a": torch.randn(70_000, generator=generator),
        "b": torch.randn(300, 7, generator=generator).t(),
    } | {
        "c": torch.randint(0, 255, (5000,), generator=generator, dtype=torch.uint8),
        "d": torch.randn(999, generator=generator).to(dtype),
    }


@pytest.mark.parametrize("cast", [None, "bfloat16"])
def test_a_device_gives_the_processors_patches_hashes_and_planes(
    host_kernels: HostKernels, cast: str | None
) -> None:
    weights = tensors(torch.float16)
    source = TorchSource(weights, cast)
    layout = Layout(source.specs(), bucket_bytes=40_000)
    host = HostCopy(source, WeightPlanes(layout))
    device = DeviceCopy(source, WeightPlanes(layout), DeviceDeltas(host_kernels), CPU)
    for bucket in layout.buckets:
        host.fill(bucket)
        device.fill(bucket)
    assert host.planes.state_hash == device.planes.state_hash
    weights["a"][::50] *= 1.1
    weights["a"][7] = float("nan")
    weights["b"][:, 3] *= -1
    weights["c"][4000:] += 1
    for bucket in layout.buckets:
        (expected, change), (found, found_change) = host.follow(bucket), device.follow(bucket)
        assert (found.delta.g8s(), found_change) == (expected.delta.g8s(), change)
        np.testing.assert_array_equal(host.planes.bits(bucket), device.planes.bits(bucket))
    device.planes.check_integrity()


def test_a_device_copy_that_differs_from_the_hosts_is_found_and_nothing_changes(
    host_kernels: HostKernels,
) -> None:
    weight = torch.zeros(9000, dtype=torch.bfloat16)
    source = TorchSource({"a": weight}, None)
    planes = WeightPlanes(Layout(source.specs()))
    kept = DeviceCopy(source, planes, DeviceDeltas(host_kernels), CPU)
    (bucket,) = planes.layout.buckets
    kept.fill(bucket)
    planes.fill(bucket, np.ones(9000, np.uint16))
    weight[5] = 1.0
    with pytest.raises(RuntimeError, match="bucket 0 on cpu differs from its copy in host memory"):
        kept.follow(bucket)
    np.testing.assert_array_equal(planes.bits(bucket), np.ones(9000, np.uint16))
    planes.check_integrity()


def test_weights_in_host_memory_are_compared_there() -> None:
    source = TorchSource({"a": torch.zeros(4)}, None)
    kept = open_kept_copy(source, WeightPlanes(Layout(source.specs())))
    assert isinstance(kept, HostCopy)


@pytest.mark.gpu
def test_weights_on_a_device_are_compared_there() -> None:
    source = TorchSource({"a": torch.zeros(4, device="cuda")}, None)
    kept = open_kept_copy(source, WeightPlanes(Layout(source.specs())))
    assert isinstance(kept, DeviceCopy)


def test_weights_on_several_devices_have_no_common_device() -> None:
    source = TorchSource({"a": torch.zeros(4), "b": torch.zeros(4, device="meta")}, None)
    assert source.device() is None
