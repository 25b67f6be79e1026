"""Engines and the pool's daemon in containers of their own, as far as the kernel's namespaces go."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_setup import NUM_SLABS, POOL, EngineProcess, observe, wait_until

from rose.memory.daemon.daemon import DaemonHandle

ROOM = ("unshare", "--user", "--map-root-user")
"""What lets a user without rights make namespaces."""
OWN = (*ROOM, "--ipc", "--net", "--uts", "--cgroup", "--mount")
"""What a container engine gives each container by default, but for a pid namespace."""
PRIVATE_SHM = 'mount -t tmpfs none /dev/shm && exec "$@"'

pytestmark = pytest.mark.skipif(
    subprocess.run([*ROOM, "-pf", "true"], check=False, capture_output=True).returncode != 0,
    reason="this user may make no namespaces",
)


def contained(*command: str) -> list[str]:
    """The command in namespaces of its own, with an empty /dev/shm. It keeps its process id."""
    return [*OWN, "sh", "-c", PRIVATE_SHM, "sh", *command]


@pytest.fixture
def engines(runtime_dir: Path, pool: DaemonHandle) -> Iterator[list[EngineProcess]]:
    """A serving and a rollout engine, each in namespaces of its own."""
    started: list[EngineProcess] = []
    try:
        for role in ("serving", "rollout"):
            started.append(EngineProcess(runtime_dir, [role, role, "scheduler", "0", "1"], contained()))
        yield started
    finally:
        for engine in started:
            engine.close()


def test_engines_with_ipc_network_and_mounts_of_their_own_share_a_pool(
    engines: list[EngineProcess], runtime_dir: Path
) -> None:
    serving, rollout = engines
    processes = ["self", *(each.process.pid for each in engines)]
    assert len({os.readlink(f"/proc/{each}/ns/{kind}") for each in processes for kind in ("ipc", "net")}) == 6
    slabs = serving.ask("acquire", NUM_SLABS)
    serving.ask("map", slabs, True)
    serving.ask("fill", 7)
    moved = slabs[: NUM_SLABS // 2]
    serving.ask("drain", moved, 1)
    assert serving.ask("unmap", moved) == moved
    assert sorted(rollout.ask("acquire", len(moved))) == sorted(moved)
    rollout.ask("map", moved, False)
    assert all(rollout.ask("read", slab) == [7] for slab in moved), "the memory is the same"
    rollout.kill()
    with observe(runtime_dir) as watcher:
        wait_until(watcher.ledger, lambda: watcher.ledger.num_free == len(moved))
        watcher.ledger.check_integrity()


@pytest.mark.parametrize("is_inside", ["client", "daemon"])
def test_a_pool_whose_processes_cannot_see_each_other_says_which_flag_mends_it(
    is_inside: str, runtime_dir: Path
) -> None:
    """The client or the daemon is in a container with pids of its own."""
    inside = ["unshare", "-Urpf", "--kill-child", sys.executable, "-c"]
    look = f"from rose.memory.pool.pool import PoolClient; PoolClient.observe({POOL!r}, timeout_s=20)"
    serve = f"from rose.memory.daemon.daemon import main; main([{POOL!r}, '--num-slabs', '4'])"
    environment = {**os.environ, "ROSE_RUNTIME_DIR": str(runtime_dir)}
    daemon = [sys.executable, "-c", serve] if is_inside == "client" else [*inside, serve]
    client = [*inside, look] if is_inside == "client" else [sys.executable, "-c", look]
    with subprocess.Popen(daemon, env=environment) as process:
        try:
            done = subprocess.run(client, env=environment, check=False, capture_output=True, text=True)
        finally:
            process.kill()  # unshare hands no other signal on
    assert "start their containers with --pid=host" in done.stderr
