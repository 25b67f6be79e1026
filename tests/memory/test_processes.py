"""Processes of other people: their descriptors come and go."""

import os

import pytest

from rose.errors import PoolError
from rose.memory import processes


def test_a_process_that_ends_while_it_is_identified_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(pid: int) -> int:
        raise PoolError(f"process {pid} is gone")

    monkeypatch.setattr(processes, "start_ticks", ended)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PoolError, match="is gone"):
        processes.watch_process(os.getpid())
    assert len(os.listdir("/proc/self/fd")) == num_open
