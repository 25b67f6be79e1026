"""Staged checkpoints are ordinary safetensors files with exactly the published bits."""

import errno
import subprocess

import numpy as np
import pytest
import safetensors.torch
import torch

from rose.errors import FrameError
from rose.transfer.format.checkpoint import checkpoint_state_hash, fill_from_checkpoint, write_checkpoint
from rose.transfer.format.layout import Layout, TensorCut
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.publish.torch_source import TorchSource

TENSORS = {
    "z.weight": torch.arange(15, dtype=torch.float32).reshape(3, 5).to(torch.bfloat16),
    "a.bias": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float32),
    "a.scale": torch.tensor(2.5, dtype=torch.bfloat16),
    "q.weight": torch.arange(7, dtype=torch.float32).to(torch.float8_e4m3fn),
}


def planes_of(tensors, bucket_bytes=16):
    source = TorchSource(tensors, dtype=None)
    planes = WeightPlanes(Layout(source.specs(), bucket_bytes))
    for bucket in planes.layout.buckets:
        planes.fill(bucket, np.concatenate(source.read(planes.layout, bucket)))
    planes.check_integrity()
    return planes


def test_safetensors_reads_back_what_was_published(tmp_path):
    path = tmp_path / "weights.safetensors"
    write_checkpoint(path, planes_of(TENSORS), {"version": "run/1"})
    loaded = safetensors.torch.load_file(path)
    assert set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert loaded[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["version"] == "run/1"
    assert list(tmp_path.iterdir()) == [path]


def test_the_state_hash_of_a_file_is_the_publishers_whoever_wrote_the_file(tmp_path):
    planes = planes_of(TENSORS)
    write_checkpoint(tmp_path / "ours.safetensors", planes, {})
    safetensors.torch.save_file(TENSORS, tmp_path / "theirs.safetensors")
    assert checkpoint_state_hash(tmp_path / "ours.safetensors") == planes.state_hash
    assert checkpoint_state_hash(tmp_path / "theirs.safetensors") == planes.state_hash


def test_a_sharded_checkpoint_folder_fills_the_planes(tmp_path):
    names = list(TENSORS)
    safetensors.torch.save_file({n: TENSORS[n] for n in names[:2]}, tmp_path / "model-1.safetensors")
    safetensors.torch.save_file({n: TENSORS[n] for n in names[2:]}, tmp_path / "model-2.safetensors")
    expected = planes_of(TENSORS)
    found = WeightPlanes(expected.layout)
    fill_from_checkpoint(found, tmp_path)
    assert found.state_hash == expected.state_hash
    for dtype, plane in expected.planes.items():
        np.testing.assert_array_equal(found.planes[dtype], plane)


def test_another_dtype_or_a_missing_tensor_or_a_broken_file_is_refused(tmp_path):
    expected = planes_of(TENSORS)
    safetensors.torch.save_file({**TENSORS, "a.bias": TENSORS["a.bias"].double()}, tmp_path / "x.safetensors")
    with pytest.raises(FrameError):
        fill_from_checkpoint(WeightPlanes(expected.layout), tmp_path / "x.safetensors")
    safetensors.torch.save_file({"a.scale": TENSORS["a.scale"]}, tmp_path / "y.safetensors")
    with pytest.raises(FrameError, match="no tensor"):
        fill_from_checkpoint(WeightPlanes(expected.layout), tmp_path / "y.safetensors")
    (tmp_path / "z.safetensors").write_bytes(b"\x05" + bytes(7) + b"hello")
    with pytest.raises(FrameError, match="not a safetensors file"):
        checkpoint_state_hash(tmp_path / "z.safetensors")


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"can't mount a small disk here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_full_disk_is_reported_with_the_numbers_and_leaves_the_old_file(small_disk, dim):
    specs = TorchSource({"w": torch.zeros(512, 512, dtype=torch.bfloat16)}, None).specs()
    cuts = {"w": TensorCut(dim=dim, points=(384,), groups=(0, 1))} if dim is not None else None
    planes = WeightPlanes(Layout(specs, cuts=cuts), held=frozenset({0}))
    path = small_disk / "weights.safetensors"
    path.write_bytes(b"old")
    numbers = r"524288 bytes of weights, \d+ of 262144 free.*weights.safetensors"
    with pytest.raises(OSError, match=numbers) as error:
        write_checkpoint(path, planes, {})
    assert error.value.errno == errno.ENOSPC
    assert [each.name for each in small_disk.iterdir()] == [path.name] and path.read_bytes() == b"old"


def test_a_rank_stages_its_rows_on_a_disk_that_is_too_small_for_all_rows(small_disk):
    specs = TorchSource({"w": torch.zeros(512, 512, dtype=torch.bfloat16)}, None).specs()
    cuts = {"w": TensorCut(dim=0, points=(128,), groups=(0, 1))}
    planes = WeightPlanes(Layout(specs, cuts=cuts), held=frozenset({0}))
    bucket = planes.layout.buckets[0]
    planes.fill(bucket, np.arange(bucket.num_elements, dtype=np.uint16))
    write_checkpoint(small_disk / "weights.safetensors", planes, {})
    assert checkpoint_state_hash(small_disk / "weights.safetensors") == planes.state_hash
