"""Several threads encode buckets; the buckets come out in order, and can be taken back."""

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
import torch

from rose.transfer.format.codec import Bits, Codec, decode
from rose.transfer.format.device.deltas import DeviceDeltas
from rose.transfer.format.device.kernels import device_kernels
from rose.transfer.format.layout import Layout
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.publish.bucket_encoder import BucketEncoder
from rose.transfer.publish.kept_copy import DeviceCopy, HostCopy, KeptCopy
from rose.transfer.publish.torch_source import TorchSource

Place = tuple[torch.device, Callable[[TorchSource, WeightPlanes], KeptCopy]]
World = tuple[TorchSource, WeightPlanes, BucketEncoder]


@pytest.fixture(params=["host", "steps on the host", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    """Returns the device that the weights are on, and the function that makes the kept copy there."""
    if request.param == "host":
        return torch.device("cpu"), HostCopy
    is_gpu = request.param == "gpu"
    device = torch.device("cuda" if is_gpu else "cpu")
    deltas = DeviceDeltas(device_kernels(0) if is_gpu else request.getfixturevalue("host_kernels"))
    return device, lambda source, planes: DeviceCopy(source, planes, deltas, device)


@pytest.fixture(params=[1, 3])
def world(request: pytest.FixtureRequest, place: Place) -> Iterator[World]:
    """Returns weights after a step, the planes from before it, and an encoder with that many threads."""
    device, make_copy = place
    weight = torch.randn(50_000, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    # The second tensor's bits must be copied to be read, into the reading thread's memory.
    source = TorchSource({"a": weight, "b": weight.view(200, 250).t()}, None)
    planes = WeightPlanes(Layout(source.specs(), bucket_bytes=8000))
    kept = make_copy(source, planes)
    for bucket in planes.layout.buckets:
        kept.fill(bucket)
    planes.check_integrity()
    weight[::17] *= 1.01
    encoder = BucketEncoder(kept, None, 125e6, request.param)
    yield source, planes, encoder
    encoder.close()


def bits_of(planes: WeightPlanes) -> Bits:
    return planes.planes["BF16"].copy()


def test_buckets_come_out_in_order_and_lead_to_the_weights(world: World) -> None:
    source, planes, encoder = world
    old = bits_of(planes)
    with closing(encoder.encode(planes.layout.buckets)) as steps:
        found = list(steps)
    assert [step.bucket for step in found] == list(planes.layout.buckets)
    planes.check_integrity()
    for step in found:
        bits = old[step.bucket.begin : step.bucket.end]
        patch = decode(step.encoded.codec, step.encoded.payload, bits)
        assert patch.apply_to(bits, step.bucket.first_index) == step.after - step.before
        np.testing.assert_array_equal(bits, planes.bits(step.bucket))
        new = np.concatenate(source.read(planes.layout, step.bucket))
        np.testing.assert_array_equal(bits, new)
        assert step.encoded.codec is not Codec.DENSE and step.encoded.num_changed > 0


@pytest.mark.parametrize("num_taken", [0, 1, 5])
def test_changes_that_are_not_committed_are_taken_back(world: World, num_taken: int) -> None:
    _, planes, encoder = world
    old, old_hash = bits_of(planes), planes.state_hash
    with closing(encoder.encode(planes.layout.buckets)) as steps:
        for _ in range(num_taken):
            next(steps)
    encoder.take_back()
    np.testing.assert_array_equal(bits_of(planes), old)
    assert planes.state_hash == old_hash
    planes.check_integrity()
    with closing(encoder.encode(planes.layout.buckets)) as steps:
        assert sum(step.encoded.num_changed for step in steps) > 0
    planes.check_integrity()


def test_committed_changes_are_never_taken_back(world: World) -> None:
    _, planes, encoder = world
    with closing(encoder.encode(planes.layout.buckets)) as steps:
        assert sum(step.encoded.num_changed for step in steps) > 0
    new = bits_of(planes)
    encoder.settle()
    encoder.take_back()
    np.testing.assert_array_equal(bits_of(planes), new)
    planes.check_integrity()
