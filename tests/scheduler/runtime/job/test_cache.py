"""Working sets of suspended phases in host memory."""

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


def test_files_of_an_earlier_larger_set_are_given_back(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "set", 1000, "train of job a")
    cache.keep({"a": np.ones(5), "b": np.ones(5)})
    cache.keep({"a": np.ones(5)})
    folder = tmp_path / "set" / "rank-0"
    assert sorted(path.name for path in folder.iterdir()) == ["0.bin", "bytes", "index.json"]
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
