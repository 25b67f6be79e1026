"""Ends what a dead actor has left on this host.

Every process of a job has in its environment which actor started it. When that actor has ended, the process
must end before its devices go to another job. The module needs only the standard library and /proc.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from rose.node import watcher

VARIABLE = "ROSE_STARTED_BY"
"""The actor's `identity` in the environment of the processes that it starts."""
KILL_S = 15.0


def identity(pid: int) -> str:
    """Names a process of this host so that no later one has the same name; empty if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{pid}:{fields[18]}" if state not in "ZX" else ""


def is_alive(name: str) -> bool:
    """Returns whether the process of this `identity` runs."""
    pid = name.partition(":")[0]
    return pid.isdecimal() and identity(int(pid)) == name


def end_leftovers(dead: tuple[str, ...] = ()) -> list[int]:
    """Kills the processes that ended actors have left; returns the pids that still run after `KILL_S`.

    dead: the identities of actors that count as dead; they are killed as well.
    """
    deadline = time.monotonic() + KILL_S
    for each in dead:
        while is_alive(each) and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(each.partition(":")[0]), signal.SIGKILL)
            time.sleep(watcher.KILLED_S)
    while sessions := _sessions():
        for leader in sessions:
            watcher.kill_group(leader, max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            break
    return sorted(_sessions())


def _sessions() -> set[int]:
    """Returns the leaders of the sessions whose actors have ended."""
    found = set()
    key = f"{VARIABLE}=".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            actor = next((each[len(key) :].decode() for each in variables if each.startswith(key)), None)
            if actor is not None and identity(int(actor.partition(":")[0])) != actor:
                found.add(os.getsid(int(entry.name)))
        except (OSError, ValueError):  # it ended meanwhile, or is another user's
            continue
    return found
