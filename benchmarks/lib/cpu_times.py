"""Reads how long processes and threads ran, and how long they waited for a CPU.

Owns the reading of Linux's schedstat. Never measures by itself: subtract two readings.
"""

from dataclasses import dataclass

import psutil

CORE = "VLLM::Engine"
"""How an engine core's process begins its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """A process's or a thread's time so far, or between two readings."""

    ran_s: float
    waited_s: float
    """Ready to run, with no core to run on."""


def read_times(path: str) -> Times:
    """Reads /proc/PID[/task/TID]/schedstat.

    Raises: FileNotFoundError when the process has ended, or where the kernel does not count.
    """
    with open(path, "rb", buffering=0) as file:
        ran_ns, waited_ns, _ = file.read().split()
    return Times(ran_s=int(ran_ns) / 1e9, waited_s=int(waited_ns) / 1e9)


def cpu_use_s(leader_pid: int) -> dict[str, float]:
    """Returns seconds since the start of an engine by part: API server, step thread, the core's others.

    Empty where the kernel has no schedstat.
    """
    found: dict[str, float] = {}
    leader = psutil.Process(leader_pid)
    for process in [leader, *leader.children(recursive=True)]:
        is_core = process.name().startswith(CORE)
        if not is_core and process is not leader:
            continue
        for thread in process.threads():
            part = "api server"
            if is_core:
                part = "step thread" if thread.id == process.pid else "core's other threads"
            try:
                times = read_times(f"/proc/{process.pid}/task/{thread.id}/schedstat")
            except FileNotFoundError:
                continue
            for name, seconds in (("computed", times.ran_s), ("had no CPU", times.waited_s)):
                key = f"{part}, {name}"
                found[key] = found.get(key, 0.0) + seconds
    return found


def tree_cpu_s(leader_pid: int) -> float:
    """Returns the seconds that the living threads of a process and its descendants have computed."""
    leader = psutil.Process(leader_pid)
    total_s = 0.0
    for process in [leader, *leader.children(recursive=True)]:
        for thread in process.threads():
            try:
                total_s += read_times(f"/proc/{process.pid}/task/{thread.id}/schedstat").ran_s
            except FileNotFoundError:
                continue
    return total_s
