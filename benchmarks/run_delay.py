"""How long an engine's threads computed, and how long they were ready to but had no CPU.

Owns the reading of Linux's schedstat. Never measures by itself: subtract two readings.
"""

from pathlib import Path

import psutil

CORE = "VLLM::Engine"
"""How an engine core's process begins its name."""


def cpu_use_s(leader_pid: int) -> dict[str, float]:
    """Seconds since the start by part: API server, the engine core's thread that steps, and its others. Empty
    where the kernel has no schedstat."""
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
            for name, seconds in _read(Path(f"/proc/{process.pid}/task/{thread.id}/schedstat")).items():
                key = f"{part}, {name}"
                found[key] = found.get(key, 0.0) + seconds
    return found


def _read(path: Path) -> dict[str, float]:
    try:
        computed_ns, waited_ns, _ = path.read_text().split()
    except FileNotFoundError:  # the thread ended, or the kernel doesn't count
        return {}
    return {"computed": int(computed_ns) / 1e9, "had no CPU": int(waited_ns) / 1e9}
