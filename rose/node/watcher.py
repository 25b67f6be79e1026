"""A watcher process per server: ends the server's process group when its leader or its supervisor dies.

After the supervisor or the server dies, even by SIGKILL, every process that is left in the server's session
gets SIGTERM, then SIGKILL, and the server's own folder is removed. Otherwise vLLM's engine core, a child of
the API server, would live on with its slabs when that is killed. No process outside the session that the
server leads is touched. The watcher is run by path with ``python -I -S``, so it imports only the standard
library.
"""

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

POLL_S = 0.05
KILLED_S = 0.002
"""A process that gets SIGKILL ends as soon as it gets a core."""


def group_members(leader_pid: int) -> list[int]:
    """Returns the pids that still run in the group led by ``leader_pid``; zombies don't count."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # it ended while we looked
            continue
        state, _parent, group, session = stat.rpartition(")")[2].split()[:4]
        if int(group) == leader_pid and int(session) == leader_pid and state not in "ZX":
            members.append(int(entry.name))
    return members


def end_group(leader_pid: int, grace_s: float) -> None:
    """Sends SIGTERM to what is left of the group, and SIGKILL to what is left after ``grace_s``."""
    deadline = time.monotonic() + grace_s
    _signal(group_members(leader_pid), signal.SIGTERM)
    while group_members(leader_pid) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    kill_group(leader_pid, grace_s)


def kill_group(leader_pid: int, at_most_s: float) -> list[int]:
    """Sends SIGKILL until nothing of the group runs; returns what still runs after ``at_most_s``."""
    deadline = time.monotonic() + at_most_s
    while members := group_members(leader_pid):  # repeated: one of them may just have forked
        _signal(members, signal.SIGKILL)
        if time.monotonic() >= deadline:
            break
        time.sleep(KILLED_S)
    return members


def _signal(pids: list[int], signum: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:  # it has ended since it was listed
            continue


def wait_for_death(pids: list[int]) -> None:
    """Returns as soon as one of ``pids`` has ended."""
    poller = select.poll()
    for pid in pids:
        try:
            poller.register(os.pidfd_open(pid), select.POLLIN)
        except ProcessLookupError:
            return
    poller.poll()


def main(argv: list[str]) -> None:
    """Runs ``watcher.py SUPERVISOR_PID SERVER_PID GRACE_S [FOLDER]``."""
    supervisor_pid, server_pid = int(argv[0]), int(argv[1])
    if os.getppid() == supervisor_pid:  # else the supervisor is already gone
        wait_for_death([supervisor_pid, server_pid])
    end_group(server_pid, float(argv[2]))
    for folder in argv[3:]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
