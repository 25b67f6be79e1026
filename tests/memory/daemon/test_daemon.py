"""The daemon and its clients in real processes: who may attach, and what a death leaves behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pool_setup import (
    HEADROOM_SLABS,
    NUM_SLABS,
    PATIENCE_S,
    POOL,
    SLAB_BYTES,
    StartEngine,
    attach,
    observe,
    wait_until,
)

from rose.errors import ConfigError, PoolError
from rose.memory.daemon.connections import MAX_CLIENTS
from rose.memory.daemon.daemon import DaemonHandle, start_daemon
from rose.memory.ledger import ledger as ledger_module
from rose.memory.ledger import ledger_words
from rose.memory.pool.pool import describe_pool
from rose.memory.pool.pool_memory import PoolSize
from rose.types import Role

SMALL_POOL = [
    *(sys.executable, "-m", "rose.memory.daemon.daemon", POOL),
    *("--num-slabs", "4", "--headroom-slabs", "1"),
]


def test_close_frees_the_engine_while_its_process_lives(pool: DaemonHandle, runtime_dir: Path) -> None:
    for _ in range(3):
        with attach(runtime_dir) as client:
            assert client.ledger.acquire(client.slot, NUM_SLABS) == list(range(NUM_SLABS))
    client.close()


def test_usage_of_a_serving_engine_is_forgotten_with_it(pool: DaemonHandle, runtime_dir: Path) -> None:
    with observe(runtime_dir) as watcher:
        with attach(runtime_dir, Role.SERVING) as serving:
            serving.ledger.set_serving_use(serving.slot, used=9, reserved=12)
        wait_until(watcher.ledger, lambda: not watcher.ledger.engines())
        assert (watcher.ledger.serving_used_slabs, watcher.ledger.serving_reserve_slabs) == (0, 0)


@pytest.mark.slow
def test_several_engines_of_a_role_share_a_pool_but_no_two_of_one_name(
    pool: DaemonHandle, start_engine: StartEngine, runtime_dir: Path
) -> None:
    for role in Role:
        first, second = (start_engine(role.value, name, "scheduler") for name in ("first", "second"))
        assert first.slot != second.slot
        with pytest.raises(PoolError, match="already has its scheduler"):
            attach(runtime_dir, role, "first")


def test_second_daemon_is_refused_and_the_first_goes_on(pool: DaemonHandle, runtime_dir: Path) -> None:
    with pytest.raises(PoolError, match="pool already owned: p has a running daemon"):
        start_daemon(POOL, num_slabs=4, headroom_slabs=1, runtime_dir=runtime_dir)
    assert describe_pool(POOL, runtime_dir=runtime_dir) == PoolSize(
        num_slabs=NUM_SLABS, slab_bytes=SLAB_BYTES, headroom_slabs=HEADROOM_SLABS
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_daemon_leaves_no_file(runtime_dir: Path, number: signal.Signals) -> None:
    daemon = start_daemon(POOL, num_slabs=4, headroom_slabs=1, runtime_dir=runtime_dir)
    assert {path.name for path in runtime_dir.iterdir()} == {"pool-p.sock", "pool-p.lock"}
    os.kill(daemon.pid, number)
    assert daemon._process.wait(PATIENCE_S) == 0
    assert list(runtime_dir.iterdir()) == []
    assert daemon.stop() == 0


def test_what_a_daemon_prints_goes_to_its_log(runtime_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "pool.log"
    start_daemon(POOL, num_slabs=4, headroom_slabs=1, runtime_dir=runtime_dir, log_path=log).stop()
    assert "pool open" in log.read_text() and "pool closed" in log.read_text()


def test_daemon_ends_with_its_starter(runtime_dir: Path) -> None:
    code = (
        "import sys, os\nfrom pathlib import Path\nfrom rose.memory.daemon.daemon import start_daemon\n"
        "print(start_daemon('p', num_slabs=4, headroom_slabs=1, runtime_dir=Path(sys.argv[1])).pid)\n"
        "sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    starter = subprocess.run(
        [sys.executable, "-c", code, str(runtime_dir)], stdout=subprocess.PIPE, text=True, check=False
    )
    deadline = time.monotonic() + PATIENCE_S
    while list(runtime_dir.iterdir()):
        assert time.monotonic() < deadline, f"daemon {starter.stdout} is still there"
        time.sleep(0.01)


def test_daemon_of_an_ended_starter_does_not_open(runtime_dir: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    done = subprocess.run(
        [*SMALL_POOL, "--runtime-dir", str(runtime_dir), "--exit-with", str(ended.pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, list(runtime_dir.iterdir())) == (2, [])
    assert f"can't watch process {ended.pid}" in done.stderr


def test_attaching_waits_for_a_daemon_that_is_starting(runtime_dir: Path) -> None:
    code = "import sys\nfrom pathlib import Path\nfrom rose.memory.pool.pool import describe_pool\n" \
        "print(describe_pool('p', runtime_dir=Path(sys.argv[1]), timeout_s=300).num_slabs)"  # fmt: skip
    early = subprocess.Popen(
        [sys.executable, "-c", code, str(runtime_dir)], stdout=subprocess.PIPE, text=True
    )
    with start_daemon(POOL, num_slabs=5, headroom_slabs=1, runtime_dir=runtime_dir):
        assert early.communicate()[0] == "5\n"


def test_pool_without_daemon_is_one_clear_line(runtime_dir: Path) -> None:
    with pytest.raises(PoolError) as refusal:
        describe_pool("gpu7", runtime_dir=runtime_dir, timeout_s=0.0)
    assert str(refusal.value).startswith(f"pool gpu7 has no daemon ({runtime_dir}/pool-gpu7.sock)")
    with pytest.raises(ConfigError, match="pool name 'a/b'"):
        describe_pool("a/b", runtime_dir=runtime_dir)
    with pytest.raises(ConfigError, match="a socket's path may have 107"):
        describe_pool("x" * 60, runtime_dir=runtime_dir / ("y" * 60))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"num_slabs": 4, "headroom_slabs": 4}, "--headroom-slabs 4: must be 0..3"),
        (
            {"num_slabs": 4, "headroom_slabs": 1, "slab_bytes": 5000},
            "multiple of the granularity of 4096 bytes, got 5000: use 8192",
        ),
        ({"num_slabs": 0, "headroom_slabs": 0}, r"--num-slabs 0: must be 2\.\.16777215; .* one slab each"),
        ({"num_slabs": 1, "headroom_slabs": 0}, r"--num-slabs 1: must be 2\.\.16777215; .* one slab each"),
        ({"num_slabs": 4, "headroom_slabs": 1, "slab_bytes": -1}, "--slab-bytes -1: must be positive"),
        ({"num_slabs": 4, "headroom_slabs": 1, "num_shards": 17}, r"--num-shards 17: must be 1\.\.16"),
    ],
)
def test_bad_sizes_are_refused_and_leave_nothing(
    runtime_dir: Path, sizes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PoolError, match=reason):
        start_daemon(POOL, runtime_dir=runtime_dir, **sizes)
    assert list(runtime_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("sizes", "needed"),
    [
        ({"num_slabs": 5_000_000}, r"10485\.8 GB"),
        ({"num_slabs": 4, "slab_bytes": 1 << 42}, r"17592\.2 GB"),
        ({"num_slabs": 100_000, "slab_bytes": 4 << 20, "num_shards": 16}, r"6710\.9 GB"),
    ],
)
def test_a_pool_larger_than_the_hosts_free_memory_is_refused_before_any_is_taken(
    runtime_dir: Path, sizes: dict[str, Any], needed: str
) -> None:
    reason = rf"needs {needed} on this host, where \d+\.\d GB are free: use --num-slabs \d+ or fewer"
    with pytest.raises(PoolError, match=reason):
        start_daemon(POOL, headroom_slabs=1, runtime_dir=runtime_dir, **sizes)
    assert list(runtime_dir.iterdir()) == []


def test_a_daemon_that_dies_before_it_answers_is_told_from_a_slow_one(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_instead(command: str, timeout_s: float) -> None:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{command}\n")
        program.chmod(0o700)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(program))
            start_daemon(POOL, num_slabs=4, headroom_slabs=1, runtime_dir=runtime_dir, timeout_s=timeout_s)

    with pytest.raises(PoolError, match="the daemon of pool p did not start within 0 s"):
        start_instead("exec sleep 600", timeout_s=0)
    with pytest.raises(PoolError, match="the daemon of pool p ended at once with status 1"):
        start_instead("exit 1", timeout_s=600)


def test_too_few_open_files_are_refused_with_the_numbers(runtime_dir: Path) -> None:
    command = f"{sys.executable} -m rose.memory.daemon.daemon {POOL} --num-slabs 4 --headroom-slabs 1"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 64; exec {command} --runtime-dir {runtime_dir}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, list(runtime_dir.iterdir())) == (2, [])
    assert "pool p with 4 slabs and up to 64 clients: needs 134 more open files" in done.stderr
    assert "the limit is 64, at most 64: run `ulimit -n 2" in done.stderr


def test_a_client_of_another_version_is_told_both_versions(
    pool: DaemonHandle, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "VERSION", ledger_words.VERSION + 1)
    theirs = ledger_words.VERSION
    with pytest.raises(
        PoolError,
        match=rf"version {theirs}, but this rose knows .* version {theirs + 1}: restart the pool daemon",
    ):
        attach(runtime_dir)


def test_clients_beyond_the_limit_are_refused(pool: DaemonHandle, runtime_dir: Path) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_CLIENTS):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(runtime_dir / "pool-p.sock"))
        with pytest.raises(PoolError, match="pool p has 64 clients, its limit; stop some"):
            describe_pool(POOL, runtime_dir=runtime_dir, timeout_s=0.2)
    # The daemon may still be hearing that they are gone: waited for.
    assert describe_pool(POOL, runtime_dir=runtime_dir).num_slabs == NUM_SLABS


def test_command_line_exits_with_status_2_and_one_line(pool: DaemonHandle, runtime_dir: Path) -> None:
    done = subprocess.run(
        [*SMALL_POOL, "--runtime-dir", str(runtime_dir)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pool already owned" in done.stderr


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"GET / HTTP/1.1\n", "bad ClientHello line"),
        (b'{"engine_id": "x", "kind": "king", "pid": 1}\n', "kind"),
        (
            b'{"engine_id": "x", "kind": "worker", "pid": 1, "protocol": 9, "new": 1}\n',
            "protocol 9, the pool's daemon 3",
        ),
        (b'{"engine_id": "x", "kind": "worker", "pid": PID, "rank": 1, "world_size": 1}\n', "rank 1 of 1"),
        (b"[" * 10_000 + b"\n", "bad ClientHello line"),
    ],
)
def test_strangers_are_answered_and_hung_up(
    pool: DaemonHandle, runtime_dir: Path, line: bytes, reason: str
) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(str(runtime_dir / "pool-p.sock"))
        stranger.sendall(line.replace(b"PID", str(os.getpid()).encode()))
        answer = b""
        while more := stranger.recv(4096):
            answer += more
    assert reason in json.loads(answer)["refused"]
    assert pool.is_running()


def test_endless_line_is_cut_off(pool: DaemonHandle, runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(str(runtime_dir / "pool-p.sock"))
        with pytest.raises(OSError):
            while True:
                stranger.sendall(b"x" * 4096)
    assert describe_pool(POOL, runtime_dir=runtime_dir).num_slabs == NUM_SLABS


def test_client_brings_slabs_ledger_and_board(pool: DaemonHandle, runtime_dir: Path) -> None:
    with attach(runtime_dir) as one, attach(runtime_dir, Role.SERVING, "s0") as two:
        assert (one.num_slabs, one.slab_bytes, one.headroom_slabs) == (NUM_SLABS, SLAB_BYTES, HEADROOM_SLABS)
        assert {one.slot, two.slot} == {1, 2} and one.daemon_pid == pool.pid
        one.board_words.store(5, 42)
        assert (len(two.board_words), two.board_words.load(5)) == (512, 42)
        assert {engine.role for engine in two.ledger.engines().values()} == set(Role)
        assert one.open_slabs().num_slabs == NUM_SLABS
        assert two.open_slabs().reserve(3).num_bytes == 3 * SLAB_BYTES
