"""Processes of other people: their descriptors come and go."""

import gc
import os

import pytest

from rose.errors import PoolError
from rose.memory.pool import processes


def test_a_process_that_ends_while_it_is_identified_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(pid: int) -> int:
        raise PoolError(f"process {pid} is gone")

    monkeypatch.setattr(processes, "start_ticks", ended)
    gc.collect()  # or what others have left is closed meanwhile, and its number is taken for ours
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(PoolError, match="is gone"):
        processes.watch_process(os.getpid())
    assert set(os.listdir("/proc/self/fd")) <= before
