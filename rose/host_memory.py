"""How much memory a process may still take on its host.

Reads the kernel's own estimate and the limits of the control groups (containers) that the process is in. A
pool's memory is a memfd: it counts against both of these, and not against the size of /dev/shm.
"""

from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")

_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""Limit and usage, in version 2 (whose one hierarchy has no controllers' names) and in version 1."""


def available_bytes(meminfo: Path = MEMINFO, own_cgroups: Path = OWN_CGROUPS, cgroups: Path = CGROUPS) -> int:
    """Bytes that this process can take without swapping or being killed, as far as the kernel says."""
    return available_and_total(meminfo, own_cgroups, cgroups)[0]


def available_and_total(
    meminfo: Path = MEMINFO, own_cgroups: Path = OWN_CGROUPS, cgroups: Path = CGROUPS
) -> tuple[int, int]:
    """Returns the bytes that this process can take, and the size of what bounds them: host memory or a
    limit."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    return min([(available, total), *_rooms(own_cgroups, cgroups)])


def _rooms(own_cgroups: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """What is left of each limit on this process's memory, and the limit."""
    lines = own_cgroups.read_text().splitlines() if own_cgroups.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in _FILES:
                # A limit on any group above counts too. Inside a container the path may lead out of what is
                # mounted; the container's own group is then the mount itself.
                root = cgroups / controller
                folder = root / path.lstrip("/")
                for group in (folder, *folder.parents):
                    if group.is_relative_to(root):
                        yield from _room(group, *_FILES[controller])


def _room(group: Path, limit_file: str, usage_file: str) -> Iterator[tuple[int, int]]:
    try:
        limit, used = (group / limit_file).read_text().strip(), int((group / usage_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the root group has no limit
        return
    if limit != "max":
        # Files that nobody has looked at lately go first when memory runs short.
        yield max(int(limit) - used + int(stat.get("inactive_file", 0)), 0), int(limit)
