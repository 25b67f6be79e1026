"""Processes whose parent is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rose.memory.pool.processes import is_readable

END_S = 60.0


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_that_take_no_signal_end_with_a_killed_parent(method: str) -> None:
    program = [sys.executable, str(Path(__file__).with_name("parents.py")), method]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            children = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
            assert len(children) == 2
            assert not any(is_readable(child) for child in children)
        finally:
            parent.kill()
        assert all(is_readable(child, END_S) for child in children)
    for child in children:
        os.close(child)


def test_a_program_that_multiprocessing_did_not_start_is_left_alone() -> None:
    program = (
        "import threading; from rose.engine.hooks.parent import end_with_parent; end_with_parent(); "
        "print(threading.active_count())"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"
