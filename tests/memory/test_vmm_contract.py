"""What every slab backend promises: on the host, on the stand-in CUDA driver, on a GPU where there is one.

The stand-in enforces the documented rules of the driver API on our calls; see stand_in_cuda.cpp for what
that does not show.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vmm_worlds import World

import rose
from rose.memory.slabs.backend import Slabs

NUM_SLABS = 6
NUM_POSITIONS = 9


@pytest.fixture
def slabs(world: World) -> Iterator[Slabs]:
    yield world.backend.create(NUM_SLABS, world.slab_bytes, "test")


def test_mapped_slabs_are_zeroed_and_accounted_for(world: World, slabs: Slabs) -> None:
    range_ = slabs.reserve(NUM_POSITIONS)
    range_.map_many([3, 4, 7], [1, 0, 5])
    assert range_.mapped() == [(3, 1), (4, 0), (7, 5)]
    assert (range_.slab_at(4), range_.slab_at(5)) == (0, None)
    assert [world.read(range_, position) for position in (3, 4, 7)] == [{0}] * 3
    assert world.accesses(range_) == [*[""] * 3, "rw", "rw", "", "", "rw", ""]


def test_rule_violations_name_the_numbers(slabs: Slabs) -> None:
    range_ = slabs.reserve(NUM_POSITIONS)
    range_.map(3, 1)
    with pytest.raises(ValueError, match="position 3 already holds slab 1, can't map slab 2"):
        range_.map(3, 2)
    with pytest.raises(ValueError, match="slab 1 is already mapped at position 3, can't map it at 4"):
        range_.map(4, 1)
    for refused in (range_.unmap, range_.zero):
        with pytest.raises(ValueError, match="position 4 holds no slab"):
            refused(4)
    with pytest.raises(ValueError, match="position 9 of 9"):
        range_.map(9, 2)
    with pytest.raises(ValueError, match="position 9 of 9"):
        range_.slab_at(9)
    with pytest.raises(ValueError, match="slab 6 of 6"):
        range_.map(4, 6)
    with pytest.raises(ValueError, match="1 positions for 2 slabs"):
        range_.map_many([4], [2, 3])
    with pytest.raises(ValueError, match="position 3 given twice"):
        range_.unmap_many([3, 3])
    assert range_.mapped() == [(3, 1)]


def test_a_refused_batch_changes_nothing(slabs: Slabs) -> None:
    range_ = slabs.reserve(NUM_POSITIONS)
    range_.map(0, 0)
    with pytest.raises(ValueError):
        range_.map_many([1, 2, 0], [1, 2, 3])
    with pytest.raises(ValueError):
        range_.unmap_many([0, 5])
    assert range_.mapped() == [(0, 0)]


def test_sizes_that_do_not_fit_are_refused_with_the_numbers_and_the_fix(world: World, slabs: Slabs) -> None:
    granularity = world.backend.granularity
    for wrong, fix in ((granularity + 1, 2 * granularity), (granularity - 1, granularity), (0, granularity)):
        message = f"multiple of the granularity of {granularity} bytes, got {wrong}: use {fix}"
        with pytest.raises(ValueError, match=message):
            world.backend.create(2, wrong, "test")
    with pytest.raises(ValueError, match=r"num_slabs must be 1\.\.\d+, got 0"):
        world.backend.create(0, granularity, "test")
    with pytest.raises(ValueError, match=r"num_positions must be 1\.\.\d+, got 0"):
        slabs.reserve(0)


def test_a_slab_needs_no_power_of_two(world: World) -> None:
    slabs = world.backend.create(2, 3 * world.slab_bytes, "test")
    range_ = slabs.reserve(3)
    range_.map_many([1, 2], [1, 0])
    assert range_.num_bytes == 9 * world.slab_bytes
    assert range_.address % world.slab_bytes == 0


def test_range_starts_at_a_slab_boundary(world: World) -> None:
    slab_bytes = 8 * world.slab_bytes
    assert world.backend.create(1, slab_bytes, "test").reserve(3).address % slab_bytes == 0


def test_a_slab_keeps_its_content_on_a_move_unless_zeroed(world: World, slabs: Slabs) -> None:
    donor, heir = slabs.reserve(NUM_POSITIONS), slabs.reserve(NUM_POSITIONS)
    donor.map(0, 2)
    world.write(donor, 0, 0x5A)
    donor.unmap(0)
    heir.map(8, 2, zero=False)
    assert world.read(heir, 8) == {0x5A}
    heir.unmap(8)
    heir.map(7, 2)
    assert world.read(heir, 7) == {0}


def test_poison_shows_whoever_reuses_without_zeroing(world: World, slabs: Slabs) -> None:
    donor, heir = slabs.reserve(NUM_POSITIONS, poison=True), slabs.reserve(NUM_POSITIONS)
    donor.map_many([0, 1, 5], [0, 1, 2])
    donor.unmap_many([0, 5])
    heir.map(0, 0, zero=False)
    heir.map(1, 2)
    assert (world.read(heir, 0), world.read(heir, 1), world.read(donor, 1)) == ({0xFF}, {0}, {0})


def test_zero_clears_a_mapped_slab_and_no_other(world: World, slabs: Slabs) -> None:
    range_ = slabs.reserve(NUM_POSITIONS)
    range_.map_many([0, 1], [0, 1])
    world.write(range_, 0, 1)
    world.write(range_, 1, 2)
    range_.zero(0)
    assert (world.read(range_, 0), world.read(range_, 1)) == ({0}, {2})


def test_guarded_positions_read_zeros_and_can_not_be_written(world: World, slabs: Slabs) -> None:
    range_ = slabs.reserve(4, guard=True)
    assert world.accesses(range_) == ["r"] * 4
    range_.map_many([1, 2], [0, 1])
    world.write(range_, 1, 9)
    assert world.accesses(range_) == ["r", "rw", "rw", "r"]
    range_.unmap_many([1])
    assert world.accesses(range_) == ["r", "r", "rw", "r"]
    assert (world.read(range_, 0), world.read(range_, 1)) == ({0}, {0})


def test_a_second_range_over_all_slabs_shows_them_wherever_the_first_has_them(
    world: World, slabs: Slabs
) -> None:
    """The transfer window of an engine with a KV connector is such a range."""
    range_, window = slabs.reserve(NUM_SLABS, poison=True, guard=True), slabs.reserve(NUM_SLABS)
    range_.map(0, 2)
    world.write(range_, 0, 1)
    window.map_many(list(range(NUM_SLABS)), list(range(NUM_SLABS)), zero=False)
    assert world.read(window, 2) == {1}
    range_.map(3, 4)
    world.write(range_, 3, 2)
    assert world.read(window, 4) == {2}
    range_.unmap(3)
    assert (world.read(window, 4), world.read(range_, 3)) == ({0xFF}, {0})
    world.write(window, 4, 3)
    range_.map(5, 4, zero=False)
    assert world.read(range_, 5) == {3}
    assert world.accesses(window) == ["rw"] * NUM_SLABS


def test_a_range_keeps_its_slabs_alive(world: World) -> None:
    range_ = world.backend.create(2, world.slab_bytes, "test").reserve(2)
    range_.map(0, 1)
    world.write(range_, 0, 3)
    assert world.read(range_, 0) == {3}


def test_another_process_sees_and_writes_the_same_memory(world: World, slabs: Slabs) -> None:
    ours = slabs.reserve(NUM_POSITIONS)
    ours.map(0, 1)
    world.write(ours, 0, 5)
    ours.unmap(0)
    fds = [slabs.export(index) for index in range(slabs.num_fds)]
    here, there = socket.socketpair()
    with here, there:
        socket.send_fds(here, [b"\0"], fds)
        for fd in fds:
            os.close(fd)
        numbers = [there.fileno(), len(fds), world.slab_bytes]
        process = subprocess.Popen(
            [
                *(sys.executable, str(Path(__file__).with_name("vmm_process.py")), *map(str, numbers)),
                *([world.library] if world.library is not None else []),
            ],
            pass_fds=[there.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(rose.__file__).parents[1])},
        )
    try:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline().split() == [str(NUM_SLABS), "5"]
        assert process.stdout.readline() == "written\n"
        ours.map(3, 1, zero=False)  # while the other process has it mapped
        assert world.read(ours, 3) == {7}
        process.communicate("end\n")
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
    assert world.read(ours, 3) == {7}


class RangeMachine(RuleBasedStateMachine):
    """Random calls on two ranges over the same slabs, against a dictionary each."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        slabs = world.backend.create(NUM_SLABS, world.slab_bytes, "test")
        self.ranges = [slabs.reserve(NUM_POSITIONS), slabs.reserve(NUM_POSITIONS, poison=True, guard=True)]
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
            assert self.world.read(range_, position) == {0}
            self.world.write(range_, position, 0xFF)

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
        self.world.write(self.ranges[which], position, 1)
        self.ranges[which].zero(position)
        assert self.world.read(self.ranges[which], position) == {0}

    @invariant()
    def agrees_with_model(self) -> None:
        for range_, model, empty in zip(self.ranges, self.models, ("", "r"), strict=True):
            assert dict(range_.mapped()) == model
            expected = ["rw" if position in model else empty for position in range(NUM_POSITIONS)]
            assert self.world.accesses(range_) == expected


@pytest.mark.slow
def test_random_calls_agree_with_a_model(world: World) -> None:
    class Machine(RangeMachine):
        def __init__(self) -> None:
            super().__init__(world)

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=25, stateful_step_count=20, deadline=None)
    )
