"""Other processes read the mirror's file as one whole version, or not at all."""

import errno
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from rose.errors import FrameError
from rose.transfer.format.checkpoint import checkpoint_state_hash
from rose.transfer.format.layout import Layout, TensorCut
from rose.transfer.format.shared_planes import PlanesFile, SharedPlanes
from rose.transfer.publish.torch_source import TorchSource

TENSORS = {
    "z.weight": torch.arange(15, dtype=torch.float32).reshape(3, 5).to(torch.bfloat16),
    "a.bias": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float32),
    "a.scale": torch.tensor(2.5, dtype=torch.bfloat16),
    "q.weight": torch.arange(7, dtype=torch.float32).to(torch.float8_e4m3fn),
}


def shared_planes(path: Path, cuts: dict[str, TensorCut] | None = None) -> SharedPlanes:
    source = TorchSource(TENSORS, dtype=None)
    planes = SharedPlanes(path, Layout(source.specs(), 16, cuts))
    with planes.changing():
        for bucket in planes.layout.buckets:
            planes.fill(bucket, np.concatenate(source.read(planes.layout, bucket)))
        planes.settle("run/1", str(planes.state_hash))
    planes.check_integrity()
    return planes


@pytest.mark.parametrize(
    "cuts", [None, {"z.weight": TensorCut(dim=1, points=(2,), groups=(0, 1))}], ids=["uncut", "cut"]
)
def test_a_reader_finds_the_version_and_every_bit(tmp_path: Path, cuts: dict[str, TensorCut] | None) -> None:
    planes = shared_planes(tmp_path / "weights", cuts)
    file = PlanesFile(tmp_path / "weights")
    planes.remove()
    with file.reading() as state:
        assert state == ("run/1", str(planes.state_hash))
    assert file.layout.digest == planes.layout.digest and file.state_hash() == planes.state_hash
    for spec in file.layout.tensors:
        expected = TENSORS[spec.name].reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(file.tensor(spec).reshape(-1).view(np.uint8), expected), spec.name
        assert file.tensor(spec).shape == spec.shape
    file.close()


def test_a_file_of_uncut_tensors_is_a_safetensors_file(tmp_path: Path) -> None:
    planes = shared_planes(tmp_path / "weights.safetensors")
    loaded = safetensors.torch.load_file(planes.path)
    assert set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert loaded[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    assert checkpoint_state_hash(planes.path) == planes.state_hash
    planes.close()


def write_as_by_an_older_subscriber(path: Path, held: list[int]) -> None:
    """Names the buckets that the file has, as subscribers did when they could hold a part of the weights."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["rose_buckets"] = ",".join(map(str, held))
    body = json.dumps(header).encode()
    body += b" " * (-len(body) % 8)
    path.write_bytes(len(body).to_bytes(8, "little") + body + data[8 + size :])


def test_a_part_of_the_weights_from_an_older_subscriber_is_refused(tmp_path: Path) -> None:
    planes = shared_planes(tmp_path / "weights")
    planes.close()
    buckets = [bucket.index for bucket in planes.layout.buckets]
    write_as_by_an_older_subscriber(planes.path, buckets)
    file = PlanesFile(planes.path)
    assert file.state_hash() == planes.state_hash
    file.close()
    write_as_by_an_older_subscriber(planes.path, buckets[1:])
    with pytest.raises(FrameError, match=f"only some of its {len(buckets)} buckets.*without --plan"):
        PlanesFile(planes.path)


def test_nobody_reads_while_the_bits_change_and_nobody_changes_them_while_they_are_read(
    tmp_path: Path,
) -> None:
    planes = shared_planes(tmp_path / "weights")
    seen: list[str] = []

    def read() -> None:
        file = PlanesFile(planes.path)
        with file.reading() as (version, _):
            seen.append(version)
        file.close()

    reader = threading.Thread(target=read)
    with planes.changing():
        reader.start()
        time.sleep(0.1)
        assert seen == []
        planes.settle("run/2", "0" * 32)
    reader.join()
    assert seen == ["run/2"]
    file = PlanesFile(planes.path)
    entered = threading.Event()

    def change() -> None:
        with planes.changing():
            entered.set()

    writer = threading.Thread(target=change)
    with file.reading():
        writer.start()
        assert not entered.wait(0.1)
    writer.join()
    assert entered.is_set()
    file.close()
    planes.close()


def test_a_change_that_was_taken_back_leaves_the_old_version_readable(tmp_path: Path) -> None:
    planes = shared_planes(tmp_path / "weights")
    with pytest.raises(FrameError), planes.changing():
        raise FrameError("wrong hash")
    file = PlanesFile(planes.path)
    with file.reading() as (version, _):
        assert version == "run/1"
    file.close()
    planes.close()


WRITER = """
import os, signal, sys
from pathlib import Path
from rose.transfer.format.layout import Layout, TensorSpec
from rose.transfer.format.shared_planes import SharedPlanes

planes = SharedPlanes(Path(sys.argv[1]), Layout([TensorSpec(name="w", dtype="BF16", shape=(64,))]))
with planes.changing():
    planes.settle("run/1", str(planes.state_hash))
with planes.changing():
    planes.planes["BF16"][:32] = 1
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_half_changed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    subprocess.run([sys.executable, "-c", WRITER, str(path)], check=False)
    file = PlanesFile(path)
    with pytest.raises(FrameError, match="its writer ended while it changed the weights"), file.reading():
        pass
    file.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a folder with room for 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"can't mount a small disk here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def big_layout(dim: int, point: int) -> Layout:
    specs = TorchSource({"w": torch.zeros(512, 512, dtype=torch.bfloat16)}, None).specs()
    return Layout(specs, cuts={"w": TensorCut(dim=dim, points=(point,), groups=(0, 1))})


@pytest.mark.parametrize("dim", [0, 1])
def test_a_full_disk_is_reported_with_the_numbers_and_nothing_is_left(small_disk: Path, dim: int) -> None:
    numbers = r"524288 bytes of weights, \d+ of 262144 free.*weights"
    with pytest.raises(OSError, match=numbers) as error:
        SharedPlanes(small_disk / "weights", big_layout(dim, 384))
    assert error.value.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []
