"""What a daemon leaves for its successor, and whom that takes for alive."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rose.errors import PoolError
from rose.memory.daemon.pool_state import MemberState, PoolState, read_state, write_state
from rose.memory.pool.processes import find_process, start_ticks
from rose.memory.pool.wire import ClientHello, Kind
from rose.memory.slabs.backend import BackendKind

STATE = PoolState(
    num_slabs=4,
    slab_bytes=4096,
    headroom_slabs=1,
    num_shards=1,
    backend=BackendKind.HOST,
    files=[(1, 2), (1, 3)],
    members=[MemberState(hello=ClientHello(engine_id="s0", kind=Kind.WORKER, pid=9, slot=1), started=77)],
    broken_slots=[1],
)


def test_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "pool-p.state"
    assert read_state(path) is None
    for _ in range(2):
        write_state(path, STATE)
        assert read_state(path) == STATE
    assert os.listdir(tmp_path) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not a pool's state"),
        ("[]", "has version None, but this rose knows 2"),
        ("{}", "has version None, but this rose knows 2"),
        (json.dumps({"version": 3, "new": True}), "has version 3, but this rose knows 2"),
        (json.dumps({"version": 2, "num_slabs": "many"}), "not a pool's state"),
    ],
)
def test_other_files_are_refused_with_the_fix(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "pool-p.state"
    path.write_text(content)
    with pytest.raises(PoolError, match=reason) as refusal:
        read_state(path)
    assert str(refusal.value).endswith(f"stop the engines of this pool, then remove {path}")


def test_a_process_is_known_by_its_start_as_well_as_by_its_pid() -> None:
    pidfd = find_process(os.getpid(), start_ticks(os.getpid()))
    assert pidfd is not None
    os.close(pidfd)
    assert find_process(os.getpid(), start_ticks(os.getpid()) + 1) is None


def test_zombies_and_the_dead_are_not_found() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_ticks(child.pid)
    pidfd = find_process(child.pid, started)
    assert pidfd is not None
    os.close(pidfd)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert find_process(child.pid, started) is None
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    assert find_process(child.pid, started) is None
    with pytest.raises(PoolError, match=f"process {child.pid} is gone"):
        start_ticks(child.pid)
