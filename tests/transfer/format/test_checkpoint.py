"""Checkpoints are read as exactly the bits that were published."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from rose.errors import FrameError
from rose.transfer.format.checkpoint import checkpoint_state_hash, fill_from_checkpoint, read_checkpoint
from rose.transfer.format.layout import Layout
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.publish.torch_source import TorchSource

TENSORS = {
    "z.weight": torch.arange(15, dtype=torch.float32).reshape(3, 5).to(torch.bfloat16),
    "a.bias": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float32),
    "a.scale": torch.tensor(2.5, dtype=torch.bfloat16),
    "q.weight": torch.arange(7, dtype=torch.float32).to(torch.float8_e4m3fn),
}


def planes_of(tensors: dict[str, torch.Tensor], bucket_bytes: int = 16) -> WeightPlanes:
    source = TorchSource(tensors, dtype=None)
    planes = WeightPlanes(Layout(source.specs(), bucket_bytes))
    for bucket in planes.layout.buckets:
        planes.fill(bucket, np.concatenate(source.read(planes.layout, bucket)))
    planes.check_integrity()
    return planes


def test_the_state_hash_of_a_file_is_the_publishers_whoever_wrote_the_file(tmp_path: Path) -> None:
    planes = planes_of(TENSORS)
    safetensors.torch.save_file(TENSORS, tmp_path / "theirs.safetensors")
    assert checkpoint_state_hash(tmp_path / "theirs.safetensors") == planes.state_hash


def test_integers_of_eight_bytes_are_no_part_of_a_checkpoints_hash(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({**TENSORS, "position_ids": torch.arange(4)}, file)
    assert checkpoint_state_hash(file) == planes_of(TENSORS).state_hash
    assert read_checkpoint(file)["position_ids"][0].num_bytes == 32
    with pytest.raises(ValueError, match="position_ids: dtype I64 can't be published"):
        Layout(spec for spec, _ in read_checkpoint(file).values())


def test_a_sharded_checkpoint_folder_fills_the_planes(tmp_path: Path) -> None:
    names = list(TENSORS)
    safetensors.torch.save_file({n: TENSORS[n] for n in names[:2]}, tmp_path / "model-1.safetensors")
    safetensors.torch.save_file({n: TENSORS[n] for n in names[2:]}, tmp_path / "model-2.safetensors")
    expected = planes_of(TENSORS)
    found = WeightPlanes(expected.layout)
    fill_from_checkpoint(found, tmp_path)
    assert found.state_hash == expected.state_hash
    for dtype, plane in expected.planes.items():
        np.testing.assert_array_equal(found.planes[dtype], plane)


def test_another_dtype_or_a_missing_tensor_or_a_broken_file_is_refused(tmp_path: Path) -> None:
    expected = planes_of(TENSORS)
    safetensors.torch.save_file({**TENSORS, "a.bias": TENSORS["a.bias"].double()}, tmp_path / "x.safetensors")
    with pytest.raises(FrameError):
        fill_from_checkpoint(WeightPlanes(expected.layout), tmp_path / "x.safetensors")
    safetensors.torch.save_file({"a.scale": TENSORS["a.scale"]}, tmp_path / "y.safetensors")
    with pytest.raises(FrameError, match="no tensor"):
        fill_from_checkpoint(WeightPlanes(expected.layout), tmp_path / "y.safetensors")
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(FrameError, match="not a safetensors file"):
        checkpoint_state_hash(tmp_path / "empty.safetensors")
    (tmp_path / "z.safetensors").write_bytes(b"\x05" + bytes(7) + b"hello")
    with pytest.raises(FrameError, match="not a safetensors file"):
        checkpoint_state_hash(tmp_path / "z.safetensors")
