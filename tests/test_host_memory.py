"""How much memory a process may still take: the host's, or its control groups' if that is less."""

from pathlib import Path

import pytest

from rose.host_memory import available_and_total, available_bytes

GIB = 1 << 30
V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
Group = tuple[str, tuple[str, str], str, int, int]


def make_host(folder: Path, own: str, groups: list[Group]) -> tuple[Path, Path, Path]:
    """A host with 8 GiB available; each group has a path, file names, limit, usage and idle file cache."""
    meminfo = folder / "meminfo"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable:    {8 * GIB // 1024} kB\n")
    own_cgroups = folder / "cgroup"
    own_cgroups.write_text(own)
    for path, names, limit, usage, inactive in groups:
        group = folder / "fs" / path
        group.mkdir(parents=True, exist_ok=True)
        (group / names[0]).write_text(f"{limit}\n")
        (group / names[1]).write_text(f"{usage}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    return meminfo, own_cgroups, folder / "fs"


@pytest.mark.parametrize(
    ("own", "groups", "expected"),
    [
        ("0::/\n", [], 8 * GIB),
        ("0::/a/b\n", [("a/b", V2, "max", GIB, 0)], 8 * GIB),
        ("0::/a/b\n", [("a/b", V2, str(3 * GIB), GIB, 0)], 2 * GIB),
        ("0::/a/b\n", [("a/b", V2, "max", GIB, 0), ("a", V2, str(5 * GIB), GIB, 0)], 4 * GIB),
        ("0::/a\n", [("a", V2, str(3 * GIB), 3 * GIB, GIB)], GIB),
        ("0::/a\n", [("a", V2, str(2 * GIB), 3 * GIB, 0)], 0),
        ("9:pids:/x\n4:memory:/a\n0::/\n", [("memory/a", V1, str(3 * GIB), GIB, 0)], 2 * GIB),
        # Inside a container the path is the host's, and the mount is the container's own group.
        ("4:memory:/not/mounted\n", [("memory", V1, str(3 * GIB), GIB, 0)], 2 * GIB),
    ],
)
def test_the_least_of_all_limits_counts(tmp_path: Path, own: str, groups: list[Group], expected: int) -> None:
    assert available_bytes(*make_host(tmp_path, own, groups)) == expected


def test_the_total_is_that_of_the_least_limit(tmp_path: Path) -> None:
    host = make_host(tmp_path, "0::/a\n", [("a", V2, str(3 * GIB), GIB, 0)])
    assert available_and_total(*host) == (2 * GIB, 3 * GIB)


def test_this_host_has_some_memory_left() -> None:
    assert 0 < available_bytes() < 1 << 50
