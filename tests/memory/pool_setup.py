"""What the pool tests share: the size of their pool, ways in, and engines in processes of their own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rose
from rose.memory.daemon.daemon import DaemonHandle, start_daemon
from rose.memory.ledger.ledger import Ledger
from rose.memory.pool.pool import PoolClient
from rose.memory.pool.wire import Kind
from rose.types import Role

POOL = "p"
NUM_SLABS = 16
SLAB_BYTES = 64 * 1024
HEADROOM_SLABS = 4
PATIENCE_S = 300.0
"""For what takes milliseconds, on a machine that is busy with something else."""


class EngineProcess:
    """An engine in its own process (engine_process.py), driven by one line per command."""

    def __init__(self, runtime_dir: Path, arguments: list[str], around: Sequence[str] = ()) -> None:
        """``around``: a command that the process is started by, and turns into."""
        script = Path(__file__).with_name("engine_process.py")
        self.process = subprocess.Popen(
            [*around, sys.executable, str(script), str(runtime_dir), POOL, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A script's sys.path starts at its own folder: rose may not be installed.
            env={**os.environ, "PYTHONPATH": str(Path(rose.__file__).parents[1])},
        )
        self.slot = self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"engine process ended with {self.process.wait()}"
        return json.loads(line)

    def ask(self, *command: object) -> Any:
        """The answer to one command: see engine_process.py."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


StartEngine = Callable[..., EngineProcess]


def start_pool(runtime_dir: Path, **sizes: Any) -> DaemonHandle:
    """A daemon of pool ``POOL``, of the usual size unless told otherwise."""
    usual = {"num_slabs": NUM_SLABS, "slab_bytes": SLAB_BYTES, "headroom_slabs": HEADROOM_SLABS}
    return start_daemon(POOL, runtime_dir=runtime_dir, **{**usual, **sizes})


def observe(runtime_dir: Path) -> PoolClient:
    return PoolClient.observe(POOL, runtime_dir=runtime_dir, timeout_s=PATIENCE_S)


def attach(
    runtime_dir: Path,
    role: Role = Role.ROLLOUT,
    engine_id: str = "here",
    *,
    kind: Kind = Kind.SCHEDULER,
    world_size: int = 1,
    timeout_s: float = PATIENCE_S,
) -> PoolClient:
    return PoolClient.attach(
        POOL,
        role=role,
        engine_id=engine_id,
        kind=kind,
        world_size=world_size,
        runtime_dir=runtime_dir,
        timeout_s=timeout_s,
    )


def wait_until(ledger: Ledger, is_so: Callable[[], bool]) -> None:
    """Waits for a change of the ledger that makes it so."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "the daemon did not react"
        ledger.wait_change(ledger.change_seq, 0.01)
