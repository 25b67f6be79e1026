"""The host's slabs and ranges: what the contract (test_vmm_contract.py) leaves to the backend."""

import os
import signal
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest

from rose._vmm import Range, SlabFile

SLAB_BYTES = 8192


def as_bytes(range_: Range, position: int) -> npt.NDArray[np.uint8]:
    whole = np.frombuffer(memoryview(range_), dtype=np.uint8)
    return whole[position * SLAB_BYTES : (position + 1) * SLAB_BYTES]


def test_nan_left_by_the_donor_is_gone_for_the_next_owner() -> None:
    slabs = SlabFile.create(1, SLAB_BYTES)
    donor, heir = slabs.reserve(2), SlabFile.from_fd(slabs.fileno(), SLAB_BYTES).reserve(2)
    donor.map(1, 0)
    np.frombuffer(memoryview(donor), dtype=np.float32)[SLAB_BYTES // 4 :][:] = np.nan
    donor.unmap(1)
    heir.map(0, 0)
    assert not as_bytes(heir, 0).any()


def test_poison_is_nan_in_every_float_format() -> None:
    slabs = SlabFile.create(1, SLAB_BYTES)
    donor, heir = slabs.reserve(1, poison=True), slabs.reserve(1)
    donor.map(0, 0)
    donor.unmap(0)
    heir.map(0, 0, zero=False)
    for dtype in (np.float16, np.float32, np.float64):
        assert np.isnan(np.frombuffer(memoryview(heir), dtype=dtype)).all()


def test_the_whole_range_is_one_buffer() -> None:
    range_ = SlabFile.create(1, SLAB_BYTES).reserve(3)
    assert range_.num_bytes == 3 * SLAB_BYTES == memoryview(range_).nbytes


def test_memory_outlives_the_last_name_while_a_buffer_is_held() -> None:
    range_ = SlabFile.create(6, SLAB_BYTES).reserve(9)
    range_.map(0, 0)
    content = as_bytes(range_, 0)
    del range_
    content[:] = 7
    assert content.sum() == 7 * SLAB_BYTES


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    head = f"import os\nimport numpy as np\nfrom rose._vmm import SlabFile\nSIZE = {SLAB_BYTES}\n"
    return subprocess.run([sys.executable, "-c", head + code], check=False, text=True, capture_output=True)


def test_touching_an_unmapped_position_faults() -> None:
    code = """
r = SlabFile.create(1, SIZE).reserve(2)
r.map(0, 0)
r.unmap(0)
np.frombuffer(r, dtype=np.uint8)[0]
"""
    assert run_python(code).returncode == -signal.SIGSEGV


def test_a_forked_child_can_not_reach_the_slabs_and_does_no_harm() -> None:
    code = """
r = SlabFile.create(1, SIZE).reserve(2)
r.map(0, 0)
content = np.frombuffer(r, dtype=np.uint8)[:SIZE]
content[:] = 5
pid = os.fork()
if pid == 0:
    content[:] = 9
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), *set(content.tolist()))
"""
    assert run_python(code).stdout.split() == [str(-signal.SIGSEGV), "5"]


def test_a_batch_that_the_kernel_refuses_half_way_is_undone() -> None:
    # The kernel limits how many mappings a process has; every other page of a reservation is made different
    # until only a few are left.
    code = """
import ctypes, mmap
from rose.errors import VmmError
r = SlabFile.create(64, SIZE).reserve(200)
r.map(0, 63)
np.frombuffer(r, dtype=np.uint8)[:SIZE] = 5
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
page = mmap.PAGESIZE
# Each takes two of them; some hosts allow a million.
num_pages = int(open("/proc/sys/vm/max_map_count").read()) + 1000
start = libc.mmap(None, ctypes.c_size_t(num_pages * page), 0, 0x4022, -1, ctypes.c_long(0))
split = 0
while libc.mprotect(ctypes.c_void_p(start + (2 * split + 1) * page), ctypes.c_size_t(page), 1) == 0:
    split += 1
for i in range(10):  # neighbours merge again: two mappings each
    libc.mprotect(ctypes.c_void_p(start + (2 * i + 1) * page), ctypes.c_size_t(page), 0)
try:
    r.map_many(list(range(2, 128, 2)), list(range(63)))
except VmmError as error:
    print(error.errno, error)
print(r.mapped(), set(np.frombuffer(r, dtype=np.uint8)[:SIZE].tolist()))
for i in range(10, 300):
    libc.mprotect(ctypes.c_void_p(start + (2 * i + 1) * page), ctypes.c_size_t(page), 0)
r.map_many(list(range(2, 128, 2)), list(range(63)))
print(len(r.mapped()))
"""
    done = run_python(code)
    refusal, state, later = done.stdout.splitlines()
    assert refusal.startswith("12 mmap: map slab ") and "of 8192 bytes at position" in refusal
    assert (state, later) == ("[(0, 63)] {5}", "64"), done.stderr


def test_slab_file_can_not_shrink() -> None:
    slabs = SlabFile.create(2, SLAB_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(slabs.fileno(), SLAB_BYTES)


def test_bad_slab_files_are_refused_with_numbers() -> None:
    slabs = SlabFile.create(3, SLAB_BYTES)
    with pytest.raises(ValueError, match="24576 bytes is not whole slabs of 16384"):
        SlabFile.from_fd(slabs.fileno(), 2 * SLAB_BYTES)
    with open("/dev/null") as other, pytest.raises(OSError, match="is not a slab file"):
        SlabFile.from_fd(other.fileno(), SLAB_BYTES)
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SLAB_BYTES)
        with pytest.raises(ValueError, match="may shrink"):
            SlabFile.from_fd(fd, SLAB_BYTES)
    finally:
        os.close(fd)
