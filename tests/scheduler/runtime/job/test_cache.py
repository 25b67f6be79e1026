"""Working sets of suspended phases in host memory."""

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.errors import CacheFull
from rose.scheduler.runtime.job.cache import ArraySet, HostCache


def test_a_set_comes_back_as_it_was(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 1 << 20, "train of job a")
    given: dict[str, np.ndarray[Any, Any]] = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "empty": np.zeros((0, 4), np.int8),
    }
    cache.keep(given)
    found = cache.arrays()
    assert found.keys() == given.keys() and cache.num_bytes == 24
    for name, array in given.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


def test_a_set_over_the_limit_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 100, "train of job a")
    cache.keep({"w": np.ones(25, np.float32)})
    with pytest.raises(CacheFull, match="train of job a: 104 bytes in 2 arrays, 100 allowed"):
        cache.keep({"w": np.ones(25, np.float32), "b": np.ones(1, np.float32)})
    assert cache.num_bytes == 100


def test_a_set_that_was_not_written_to_its_end_is_not_there(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 100, "train of job a")
    cache.keep({"w": np.ones(5, np.float32)})
    (tmp_path / "set" / "rank-0" / "index.json").unlink()  # what an offload does first
    assert cache.arrays() == {} and cache.num_bytes == 0
    cache.keep({"w": np.zeros(5, np.float32)})
    assert not cache.arrays()["w"].any()


@pytest.mark.parametrize("size", [0, 1, (2 << 20) - 1, (2 << 20) + 1, 5_000_001])
def test_arrays_of_all_lengths_and_orders_come_back(tmp_path: Path, size: int) -> None:
    cache = HostCache(tmp_path / "set", 1 << 30, "train of job a")
    row = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    cache.keep({"row": row, "backwards": row[::-1], "transposed": np.ones((3, 5), np.float16).T})
    found = cache.arrays()
    assert np.array_equal(found["row"], row) and np.array_equal(found["backwards"], row[::-1])
    assert found["transposed"].shape == (5, 3) and found["transposed"].all()


def test_arrays_of_the_set_itself_can_be_kept_again(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 1 << 30, "train of job a")
    one, two = np.arange(10_000), np.arange(10_000, 20_000)
    cache.keep({"one": one, "two": two})
    cache.keep({"new": one, "two": cache.arrays()["two"], "more": two})
    assert np.array_equal(cache.arrays()["two"], two)
    cache.keep({"two": cache.arrays()["two"]})
    assert np.array_equal(cache.arrays()["two"], two)


def test_types_without_a_name_are_kept_and_objects_are_refused(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 1 << 30, "train of job a")
    pairs = np.array([(1, 2.0), (3, 4.0)], np.dtype([("a", "i4"), ("b", "f8")]))
    cache.keep({"pairs": pairs})
    with pytest.raises(ValueError, match="train of job a: things has Python objects"):
        cache.keep({"things": np.array([{}, []], object)})
    assert np.array_equal(cache.arrays()["pairs"].view(pairs.dtype), pairs)


def test_an_empty_set_is_kept_and_found_empty(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 100, "train of job a")
    cache.keep({})
    assert cache.arrays() == {} and cache.num_bytes == 0


def test_a_later_set_of_the_same_size_is_in_the_same_memory(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 100, "train of job a")
    cache.keep({"w": np.zeros(20, np.uint8)})
    memory = cache.memory
    cache.keep({"w": np.ones(20, np.uint8)})
    assert cache.memory is memory and memory.all()


def test_a_set_is_kept_anew_after_another_process_has_removed_the_folder(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 100, "train of job a")
    cache.keep({"w": np.zeros(20, np.uint8)})
    HostCache(tmp_path / "set", 100, "train of job a").forget()
    assert cache.arrays() == {}
    cache.keep({"w": np.ones(20, np.uint8)})
    assert HostCache(tmp_path / "set", 100, "train of job a").arrays()["w"].all()


def test_a_set_for_which_the_host_has_no_memory_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 1 << 60, "train of job a")
    cache.keep({"w": np.ones(25, np.uint8)})
    with (
        pytest.raises(CacheFull, match=r"has no room .*give the host's shared memory more"),
        cache.replacing({"w": ("|u1", (1 << 50,))}),
    ):
        raise AssertionError("a pebibyte was there")
    assert cache.arrays()["w"].all() and cache.num_bytes == 25


ON_FULL_MEMORY = """
import os, sys
from pathlib import Path
import numpy as np
from rose.errors import CacheFull
from rose.scheduler.runtime.job.cache import HostCache
folder = Path(sys.argv[1])
caches = [HostCache(folder / "set", 1 << 30, "train of job a", rank) for rank in (0, 1)]
large, small = {"w": np.ones(100_000, np.uint8)}, {"w": np.ones(10, np.uint8)}
caches[0].keep(large)
with (folder / "others").open("wb", buffering=0) as others:
    try:
        while True:
            others.write(bytes(4096))
    except OSError:
        pass
caches[0].keep(large)
for cache, given in ((caches[1], small), (caches[1], large), (caches[0], small)):
    try:
        cache.keep(given)
    except CacheFull as error:
        assert "has no room (No space left on device)" in str(error), error
    else:
        raise AssertionError("there was room")
caches[0].keep(large)
(folder / "others").unlink()
caches[1].keep(small)
print([cache.num_bytes for cache in caches])
"""


def test_on_full_memory_a_set_stays_and_one_like_it_takes_its_place(tmp_path: Path) -> None:
    mounted = f'mount -t tmpfs -o size=256k none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, ON_FULL_MEMORY]
    if subprocess.run([*command[:3], "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may mount nothing here")
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout == "[100000, 10]\n", ended.stderr


def test_a_set_whose_filling_fails_is_not_there(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 100, "train of job a")
    cache.keep({"w": np.ones(25, np.uint8)})
    with pytest.raises(KeyError), cache.replacing({"w": ("|u1", (25,))}):
        raise KeyError
    assert cache.arrays() == {}


KEEPS_FOREVER = """
import itertools, sys
from pathlib import Path
import numpy as np
from rose.scheduler.runtime.job.cache import HostCache
cache = HostCache(Path(sys.argv[1]), 1 << 30, "train of job a")
for number in itertools.count(1):
    cache.keep({name: np.full(1 << 20, number) for name in "ab"})
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_whole_set_or_none(tmp_path: Path) -> None:
    chance = random.Random(0)
    for _ in range(10):
        argv = [sys.executable, "-c", KEEPS_FOREVER, str(tmp_path)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(chance.uniform(0, 0.1))
            process.kill()
            numbers = [int(line) for line in process.stdout.readlines()]
        arrays = HostCache(tmp_path, 1 << 30, "train of job a").arrays()
        values = {int(value) for each in arrays.values() for value in (each.min(), each.max())}
        assert len(values) == (1 if arrays else 0), "parts of two sets"
        assert not values or not numbers or values.pop() >= numbers[-1]


def test_files_of_an_earlier_larger_set_are_given_back(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 1000, "train of job a")
    cache.keep({"a": np.ones(5), "b": np.ones(5)})
    cache.keep({"a": np.ones(5)})
    folder = tmp_path / "set" / "rank-0"
    assert sorted(path.name for path in folder.iterdir()) == ["claim", "index.json", "set.bin"]
    assert (folder / "set.bin").stat().st_size == 40
    cache.forget()
    assert not folder.exists()


def test_an_array_set_holds_nothing_while_it_is_suspended(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 1000, "train of job a")
    weights = ArraySet()
    weights.arrays = {"w": np.arange(5)}
    weights.offload(cache)
    assert weights.arrays == {}
    weights.load(cache)
    weights.arrays["w"][0] = 7  # ours again, not the cache's pages
    assert cache.arrays()["w"][0] == 0


def test_each_rank_gets_its_own_set_back_and_all_share_one_limit(tmp_path: Path) -> None:
    caches = [HostCache(tmp_path / "train", 100, "train of job a", rank) for rank in (0, 1)]
    for rank, cache in enumerate(caches):
        cache.keep({"w": np.full(10, rank, np.float32)})
    assert [cache.arrays()["w"][0] for cache in caches] == [0, 1]
    with pytest.raises(CacheFull, match="64 bytes in 1 arrays, 40 of 1 other ranks, 100 allowed"):
        caches[0].keep({"w": np.ones(16, np.float32)})
    assert [cache.num_bytes for cache in caches] == [40, 40]
    caches[1].forget()
    caches[0].keep({"w": np.ones(16, np.float32)})
