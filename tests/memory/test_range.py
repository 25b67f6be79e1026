"""rose._vmm: the host twin keeps CUDA's rules, and a slab never carries its donor's bytes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rose._vmm import Range, SlabFile

SLAB_BYTES = 8192
NUM_SLABS = 6
NUM_POSITIONS = 9


def make_range(num_slabs: int = NUM_SLABS, num_positions: int = NUM_POSITIONS) -> Range:
    return Range(SlabFile.create(num_slabs, SLAB_BYTES), num_positions)


def permissions(range_: Range) -> list[str]:
    """What the kernel says of each position, e.g. "rw-s" or "---p"."""
    areas = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags = line.split()[:2]
        start, end = (int(each, 16) for each in span.split("-"))
        areas.append((start, end, flags))
    found = []
    for position in range(range_.num_positions):
        at = range_.address + position * range_.slab_bytes
        found.append(next(flags for start, end, flags in areas if start <= at < end))
    return found


def as_bytes(range_: Range, position: int) -> npt.NDArray[np.uint8]:
    whole = np.frombuffer(memoryview(range_), dtype=np.uint8)
    return whole[position * SLAB_BYTES : (position + 1) * SLAB_BYTES]


class RangeMachine(RuleBasedStateMachine):
    """Random calls on two ranges over one file, against a dictionary each."""

    def __init__(self) -> None:
        super().__init__()
        slabs = SlabFile.create(NUM_SLABS, SLAB_BYTES)
        self.ranges = [Range(slabs, NUM_POSITIONS), Range(slabs, NUM_POSITIONS)]
        self.models: list[dict[int, int]] = [{}, {}]

    @rule(
        which=st.integers(0, 1),
        pairs=st.lists(
            st.tuples(st.integers(0, NUM_POSITIONS), st.integers(0, NUM_SLABS)), min_size=1, max_size=4
        ),
    )
    def map_many(self, which: int, pairs: list[tuple[int, int]]) -> None:
        range_, model = self.ranges[which], self.models[which]
        positions, slabs = [p for p, _ in pairs], [s for _, s in pairs]
        is_allowed = (
            len(set(positions)) == len(set(slabs)) == len(pairs)
            and all(p < NUM_POSITIONS and p not in model for p in positions)
            and all(s < NUM_SLABS and s not in model.values() for s in slabs)
        )
        if not is_allowed:
            with pytest.raises(ValueError):
                range_.map_many(positions, slabs)
            return
        range_.map_many(positions, slabs)
        model.update(pairs)
        for position in positions:
            content = as_bytes(range_, position)
            assert not content.any()
            content[:] = 0xFF

    @rule(which=st.integers(0, 1), positions=st.lists(st.integers(0, NUM_POSITIONS), max_size=4))
    def unmap_many(self, which: int, positions: list[int]) -> None:
        range_, model = self.ranges[which], self.models[which]
        if len(set(positions)) < len(positions) or any(p not in model for p in positions):
            with pytest.raises(ValueError):
                range_.unmap_many(positions)
            return
        range_.unmap_many(positions)
        for position in positions:
            del model[position]

    @precondition(lambda self: any(self.models))
    @rule(data=st.data())
    def zero(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from([i for i in (0, 1) if self.models[i]]))
        position = data.draw(st.sampled_from(sorted(self.models[which])))
        as_bytes(self.ranges[which], position)[:] = 1
        self.ranges[which].zero(position)
        assert not as_bytes(self.ranges[which], position).any()

    @invariant()
    def agrees_with_model_and_kernel(self) -> None:
        for range_, model in zip(self.ranges, self.models, strict=True):
            assert dict(range_.mapped()) == model
            expected = ["rw-s" if position in model else "---p" for position in range(NUM_POSITIONS)]
            assert permissions(range_) == expected


RangeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestRangeAgainstModel = RangeMachine.TestCase


def test_rule_violations_name_the_numbers() -> None:
    range_ = make_range()
    range_.map(3, 1)
    with pytest.raises(ValueError, match="position 3 already holds slab 1, can't map slab 2"):
        range_.map(3, 2)
    with pytest.raises(ValueError, match="slab 1 is already mapped at position 3, can't map it at 4"):
        range_.map(4, 1)
    with pytest.raises(ValueError, match="position 4 holds no slab"):
        range_.unmap(4)
    with pytest.raises(ValueError, match="position 4 holds no slab"):
        range_.zero(4)
    with pytest.raises(ValueError, match="position 9 of 9"):
        range_.map(9, 2)
    with pytest.raises(ValueError, match="slab 6 of 6"):
        range_.map(4, 6)
    with pytest.raises(ValueError, match="1 positions for 2 slabs"):
        range_.map_many([4], [2, 3])


def test_a_refused_batch_changes_nothing() -> None:
    range_ = make_range()
    range_.map(0, 0)
    with pytest.raises(ValueError):
        range_.map_many([1, 2, 0], [1, 2, 3])
    with pytest.raises(ValueError):
        range_.unmap_many([0, 5])
    assert range_.mapped() == [(0, 0)]


def test_nan_left_by_the_donor_is_gone_for_the_next_owner() -> None:
    slabs = SlabFile.create(1, SLAB_BYTES)
    donor, heir = Range(slabs, 2), Range(SlabFile.from_fd(slabs.fileno(), SLAB_BYTES), 2)
    donor.map(1, 0)
    np.frombuffer(memoryview(donor), dtype=np.float32)[SLAB_BYTES // 4 :][:] = np.nan
    donor.unmap(1)
    heir.map(0, 0)
    assert not as_bytes(heir, 0).any()


def test_range_starts_at_a_slab_boundary() -> None:
    slab_bytes = 2 << 20
    range_ = Range(SlabFile.create(1, slab_bytes), 3)
    assert range_.address % slab_bytes == 0
    assert range_.num_bytes == 3 * slab_bytes == memoryview(range_).nbytes


def test_memory_outlives_the_last_name_while_a_buffer_is_held() -> None:
    range_ = make_range()
    range_.map(0, 0)
    content = as_bytes(range_, 0)
    del range_
    content[:] = 7
    assert content.sum() == 7 * SLAB_BYTES


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    head = f"import os\nimport numpy as np\nfrom rose._vmm import Range, SlabFile\nSIZE = {SLAB_BYTES}\n"
    return subprocess.run([sys.executable, "-c", head + code], check=False, text=True, capture_output=True)


def test_touching_an_unmapped_position_faults() -> None:
    code = """
r = Range(SlabFile.create(1, SIZE), 2)
r.map(0, 0)
r.unmap(0)
np.frombuffer(r, dtype=np.uint8)[0]
"""
    assert run_python(code).returncode == -signal.SIGSEGV


def test_a_forked_child_can_not_reach_the_slabs_and_does_no_harm() -> None:
    code = """
r = Range(SlabFile.create(1, SIZE), 2)
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


def test_slab_file_can_not_shrink() -> None:
    slabs = SlabFile.create(2, SLAB_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(slabs.fileno(), SLAB_BYTES)


def test_bad_slab_files_are_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match=r"power of two .* got 5000"):
        SlabFile.create(1, 5000)
    with pytest.raises(ValueError, match=r"power of two .* got 1024"):
        SlabFile.create(1, 1024)
    with pytest.raises(ValueError, match="num_slabs must be"):
        SlabFile.create(0, SLAB_BYTES)
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
    with pytest.raises(ValueError, match="num_positions must be"):
        Range(slabs, 0)
