"""The CUDA backend when the driver says no: one clear exception, and everything as it was before.

The driver is the stand-in: it fails the call that it is told to. What the real one does after an error of
its own is not shown here.
"""

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vmm_worlds import World

from rose._vmm import CudaDevice, CudaSlabs
from rose.errors import PoolError, VmmError
from rose.memory.slabs.backend import BackendKind, CudaBackend, SlabRange, open_backend

OUT_OF_MEMORY = 2
INVALID_VALUE = 1
NEVER = 0


class StandIn(World):
    """The CUDA backend on the stand-in driver."""

    def __init__(self, library: Path) -> None:
        super().__init__(str(library))
        self.driver.stand_in_calls.restype = ctypes.c_char_p

    def fail(self, call: bytes = b"*", *, skip: int = 0, count: int = 1, error: int = OUT_OF_MEMORY) -> None:
        """After ``skip`` more calls, the next ``count`` fail."""
        self.driver.stand_in_fail(call, skip, count, error)

    def calls(self, work: Callable[[], object]) -> list[str]:
        """The driver calls that ``work`` makes, without those that choose the context."""
        self.driver.stand_in_forget()
        work()
        names = self.driver.stand_in_calls().decode().split()
        return [name for name in names if name not in ("cuCtxPushCurrent", "cuCtxPopCurrent")]

    def num_held(self) -> int:
        return int(self.driver.stand_in_num_held())


@pytest.fixture
def stand_in(stand_in_library: Path) -> Iterator[StandIn]:
    gc.collect()  # ranges in another test's garbage would make driver calls while ours are counted
    made = StandIn(stand_in_library)
    yield made
    made.fail(count=NEVER)
    made.close()


def state(world: World, range_: SlabRange) -> tuple[list[tuple[int, int]], list[str], list[set[int]]]:
    """All that a failed batch must leave alone: the account, the access, the content."""
    mapped = range_.mapped()
    return mapped, world.accesses(range_), [world.read(range_, position) for position, _ in mapped]


def fail_every_call(stand_in: StandIn, range_: SlabRange, work: Callable[[], None]) -> int:
    """Runs ``work`` with its first, second, .. driver call failing, until it gets through."""
    before = state(stand_in, range_)
    for skip in range(100):
        stand_in.fail(skip=skip)
        try:
            work()
        except VmmError as error:
            assert "CUDA_ERROR_OUT_OF_MEMORY (out of memory)" in str(error)
            stand_in.fail(count=NEVER)
            assert state(stand_in, range_) == before, f"call {skip}: {error}"
        else:
            stand_in.fail(count=NEVER)
            return skip
    raise AssertionError("it never gets through")


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.slow
def test_a_failure_at_any_call_of_a_batch_leaves_it_undone(stand_in: StandIn, guard: bool) -> None:
    range_ = stand_in.backend.create(6, stand_in.slab_bytes, "test").reserve(9, guard=guard)
    range_.map(0, 5)
    stand_in.write(range_, 0, 9)
    assert fail_every_call(stand_in, range_, lambda: range_.map_many([3, 4, 7], [0, 2, 1])) > 8
    assert range_.mapped() == [(0, 5), (3, 0), (4, 2), (7, 1)]
    for position, byte in ((3, 1), (4, 2), (7, 3)):
        stand_in.write(range_, position, byte)
    assert fail_every_call(stand_in, range_, lambda: range_.unmap_many([4, 0, 3])) > 6
    assert range_.mapped() == [(7, 1)]


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, INVALID_VALUE])
def test_a_failure_while_making_things_holds_nothing_back(stand_in: StandIn, error: int) -> None:
    assert stand_in.library is not None

    def make() -> None:
        backend = CudaBackend(1, str(stand_in.library))
        slabs = backend.create(3, backend.granularity, "test")
        slabs.reserve(4, guard=True).map_many([0, 2], [1, 2])

    num_held = stand_in.num_held()
    is_made = False
    skip = 0
    while not is_made:
        stand_in.fail(skip=skip, error=error)
        try:
            make()
            is_made = True
        except VmmError:
            skip += 1
        # Here, where the exception no longer holds the frame with its objects.
        stand_in.fail(count=NEVER)
        if not is_made:
            assert stand_in.num_held() == num_held, f"call {skip}"
    assert skip > 20


@pytest.mark.slow
def test_the_message_names_call_slab_and_sizes(stand_in: StandIn) -> None:
    slabs = stand_in.backend.create(3, stand_in.slab_bytes, "test")
    range_ = slabs.reserve(4)
    stand_in.fail(b"cuMemMap", skip=1)
    with pytest.raises(VmmError) as failed:
        range_.map_many([0, 1], [2, 1])
    assert str(failed.value) == (
        "cuMemMap failed on device 0: CUDA_ERROR_OUT_OF_MEMORY (out of memory): "
        "slab 1 of 65536 bytes at position 1"
    )
    assert isinstance(failed.value, OSError) and isinstance(failed.value, PoolError)
    stand_in.fail(b"cuMemCreate", skip=2)
    with pytest.raises(VmmError, match=r"^cuMemCreate failed .*: slab 2 of 5, 131072 bytes each"):
        stand_in.backend.create(5, 2 * stand_in.slab_bytes, "test")
    with pytest.raises(
        VmmError, match=r"^cuMemImport.* CUDA_ERROR_INVALID_VALUE .*slab 0 of 1, descriptor 0"
    ):
        stand_in.backend.adopt([0], stand_in.slab_bytes)
    with pytest.raises(ValueError, match="slab 3 of 3"):
        slabs.export(3)


def test_a_failed_undo_is_told_and_the_account_stays_true(stand_in: StandIn) -> None:
    range_ = stand_in.backend.create(3, stand_in.slab_bytes, "test").reserve(4)
    # Each call needs the context first. The second cuMemSetAccess fails, and so do the undo's first steps: to
    # wait for the device, and to unmap the first slab.
    stand_in.fail(skip=7, count=3)
    with pytest.raises(
        VmmError, match=r"^cuMemSetAccess .*(; undoing it failed too: cuCtxPushCurrent.*){2}$"
    ):
        range_.map_many([0, 2], [0, 1])
    assert range_.mapped() == [(0, 0)]
    assert stand_in.accesses(range_) == ["rw", "", "", ""]
    range_.map_many([2], [1])
    range_.unmap_many([0, 2])
    assert range_.mapped() == []


@pytest.mark.slow
def test_slabs_are_unmapped_only_after_the_device_is_idle(stand_in: StandIn) -> None:
    range_ = stand_in.backend.create(3, stand_in.slab_bytes, "test").reserve(4)
    range_.map_many([0, 1, 2], [0, 1, 2])
    unmap = ["cuMemUnmap"]
    assert stand_in.calls(lambda: range_.unmap_many([0, 1])) == ["cuCtxSynchronize", *unmap * 2]
    assert stand_in.calls(lambda: range_.unmap(2, fence=False)) == unmap
    assert stand_in.calls(range_.fence) == ["cuCtxSynchronize"]


def test_mapping_never_waits_for_the_device(stand_in: StandIn) -> None:
    range_ = stand_in.backend.create(3, stand_in.slab_bytes, "test").reserve(4, guard=True)
    exchange = ["cuMemUnmap", "cuMemMap", "cuMemSetAccess"]
    assert stand_in.calls(lambda: range_.map(1, 2, zero=False)) == exchange
    default_stream = 0
    zeroed = stand_in.calls(lambda: range_.map_many([2], [0], stream=default_stream))
    assert zeroed == [*exchange, "cuMemsetD8Async"]
    range_.fence()
    assert stand_in.read(range_, 2) == {0}


def test_slabs_leave_before_their_positions_are_guarded_if_so_wished(stand_in: StandIn) -> None:
    range_ = stand_in.backend.create(4, stand_in.slab_bytes, "test").reserve(5, guard=True)
    range_.map_many([0, 1, 2, 3], [0, 1, 2, 3])
    unmap = stand_in.calls(lambda: range_.unmap_many([1, 2, 3], fence=False, guard=False))
    assert unmap == ["cuMemUnmap"] * 3
    assert stand_in.accesses(range_) == ["rw", "", "", "", "r"]
    bare = stand_in.calls(lambda: range_.map(3, 1, zero=False))
    assert bare == ["cuMemMap", "cuMemSetAccess"]
    assert stand_in.calls(range_.guard) == ["cuMemMap"] * 2 + ["cuMemSetAccess"]
    assert stand_in.accesses(range_) == ["rw", "r", "r", "rw", "r"]
    assert stand_in.calls(range_.guard) == []


def test_memory_is_made_exported_and_imported_without_a_context(stand_in: StandIn) -> None:
    device = CudaDevice(0, str(stand_in.library))

    def own() -> None:
        slabs = device.create(2, device.granularity)
        fds = [slabs.export(index) for index in range(slabs.num_fds)]
        device.import_fds(fds, device.granularity)
        for fd in fds:
            os.close(fd)

    num_held = stand_in.num_held()
    assert not [call for call in stand_in.calls(own) if "Ctx" in call]
    assert device.free_bytes > 0
    assert stand_in.num_held() == num_held  # the context that was asked has ended


def test_access_and_zeroing_take_one_call_for_neighbours(stand_in: StandIn) -> None:
    range_ = stand_in.backend.create(6, stand_in.slab_bytes, "test").reserve(9)
    range_.map(0, 5)  # the first fill makes the stream for fills
    calls = stand_in.calls(lambda: range_.map_many([4, 1, 3, 2, 7], [0, 1, 2, 3, 4]))
    zero = ["cuMemsetD8Async"] * 2 + ["cuStreamSynchronize"]
    assert calls == ["cuMemMap"] * 5 + ["cuMemSetAccess"] * 2 + zero


def test_everything_is_given_back_in_the_end(stand_in: StandIn) -> None:
    num_held = stand_in.num_held()
    device = CudaDevice(0, str(stand_in.library))
    slabs = device.create(3, device.granularity)
    range_ = slabs.reserve(4, guard=True)
    range_.map_many([0, 1], [0, 1])
    del device, slabs
    assert range_.mapped() == [(0, 0), (1, 1)]  # a range keeps what it stands on
    del range_
    assert stand_in.num_held() == num_held


def test_the_range_is_a_cuda_array_of_bytes(stand_in: StandIn) -> None:
    device = CudaDevice(0, str(stand_in.library))
    range_ = device.create(2, device.granularity).reserve(3)
    described = range_.__cuda_array_interface__
    assert described["shape"] == (3 * device.granularity,) and described["typestr"] == "|i1"
    assert described["data"] == (range_.address, False)
    with pytest.raises(TypeError):
        memoryview(range_)  # type: ignore[arg-type]
    assert isinstance(device.create(1, device.granularity), CudaSlabs)


def test_no_driver_and_no_device_are_clear_errors(stand_in: StandIn, tmp_path: Path) -> None:
    missing = str(tmp_path / "libcuda.so.1")
    with pytest.raises(VmmError, match=f"^no CUDA driver: {missing}: .*use the host backend"):
        CudaBackend(0, missing)
    with pytest.raises(VmmError, match=r"^libm.so.6 has no cuInit: rose needs CUDA 11.2"):
        CudaBackend(0, "libm.so.6")
    with pytest.raises(ValueError, match=r"device 2 of 2 that the driver shows: .*CUDA_VISIBLE_DEVICES"):
        CudaBackend(2, str(stand_in.library))
    assert open_backend(BackendKind.HOST).granularity > 0


def test_a_forked_child_is_refused_and_does_no_harm(stand_in: StandIn) -> None:
    code = """
import os, sys
from rose._vmm import CudaDevice
device = CudaDevice(0, sys.argv[1])
range_ = device.create(2, device.granularity).reserve(2)
range_.map(0, 0)
pid = os.fork()
if pid == 0:
    try:
        range_.unmap(0)
    except ValueError as error:
        print(error, flush=True)
    del range_, device
    os._exit(0)
os.waitpid(pid, 0)
range_.unmap(0)
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(stand_in.library)], check=False, text=True, capture_output=True
    )
    assert done.stdout == "slabs of a GPU can't be used in a forked child: spawn it\nalive\n", done.stderr
