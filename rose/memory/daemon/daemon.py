"""The pool daemon as a process: its command line, and how another process starts and stops it.

`start_daemon` returns a daemon that answers, or raises the reason that the daemon gave. Such a daemon ends
with the process that started it. owner.py has what the daemon does.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from rose.arguments import BAD_INPUT_STATUS, CommandParser, model_name, run_command
from rose.config import Settings
from rose.errors import ConfigError, PoolError, RoseError
from rose.memory.daemon.owner import PoolOwner
from rose.memory.daemon.pool_state import living_size
from rose.memory.pool.processes import is_readable
from rose.memory.pool.sizing import DEFAULT_SLAB_BYTES, OpenSize
from rose.memory.pool.wire import socket_path
from rose.memory.slabs.backend import BackendKind

_STOP_TIMEOUT_S = 5.0
"""A daemon stops within one round of events. One that doesn't is stuck."""


class DaemonHandle:
    """A daemon that this process started. Stop it, or use it as a context manager."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        """Returns whether the process is alive."""
        return self._process.poll() is None

    def stop(self) -> int:
        """Ends the daemon; its clients keep the memory they hold. Returns its exit status. Idempotent."""
        self._process.terminate()
        try:
            return self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_daemon(
    name: str,
    *,
    num_slabs: int,
    headroom_slabs: int,
    slab_bytes: int = DEFAULT_SLAB_BYTES[BackendKind.HOST],
    num_shards: int = 1,
    backend: BackendKind = BackendKind.HOST,
    runtime_dir: Path | None = None,
    log_path: Path | None = None,
    timeout_s: float = 60.0,
) -> DaemonHandle:
    """Starts a daemon that ends with this process, and waits until it answers.

    If ``runtime_dir`` is None, the environment says it. What the daemon prints is added to ``log_path``, or
    goes where this process prints. Raises: PoolError with the daemon's own reason.
    """
    if runtime_dir is None:
        runtime_dir = Settings.from_environment().make_runtime_dir()
    reader, writer = os.pipe()
    with (
        os.fdopen(reader, "rb") as answers,
        nullcontext() if log_path is None else log_path.open("ab") as log,
    ):
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "rose.memory.daemon.daemon", name),
                    *("--num-slabs", str(num_slabs), "--slab-bytes", str(slab_bytes)),
                    *("--headroom-slabs", str(headroom_slabs), "--num-shards", str(num_shards)),
                    *("--backend", backend, "--runtime-dir", str(runtime_dir)),
                    *("--exit-with", str(os.getpid()), "--ready-fd", str(writer)),
                ],
                pass_fds=(writer,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        finally:
            os.close(writer)
        handle = DaemonHandle(name, process)
        is_late = not is_readable(answers.fileno(), timeout_s)
        answer = answers.readline() if not is_late else b""
    error = json.loads(answer)["error"] if answer else None
    if answer and error is None:
        return handle
    status = handle.stop()
    if error is None:
        what = f"did not start within {timeout_s:g} s" if is_late else f"ended at once with status {status}"
        error = f"the daemon of pool {name} {what}; its log has the reason"
    raise PoolError(error)


def main(argv: Sequence[str]) -> int:
    """Runs `rose pool` until a stop signal. Raises: PoolError or ConfigError if the pool can't be opened.

    If it ends while engines live, they keep its memory, and the next daemon takes that over.
    """
    options = _make_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        owner = _open(options)
    except RoseError as error:
        if options.ready_fd is None:
            raise
        _report(options.ready_fd, str(error))  # the starter shows it
        return BAD_INPUT_STATUS
    with owner:
        if options.ready_fd is not None:
            _report(options.ready_fd, None)
        owner.run()
    return 0


def _open(options: argparse.Namespace) -> PoolOwner:
    runtime_dir: Path | None = options.runtime_dir
    if runtime_dir is None:
        runtime_dir = Settings.from_environment().make_runtime_dir()
    elif not runtime_dir.is_dir():
        raise ConfigError(f"--runtime-dir {runtime_dir}: no such folder; create it with mode 0700")
    given = OpenSize(
        num_slabs=options.num_slabs,
        slab_bytes=options.slab_bytes,
        headroom_slabs=options.headroom_slabs,
        num_shards=options.num_shards,
        backend=BackendKind(options.backend) if options.backend is not None else None,
    )
    try:
        # What a former daemon chose: the memory that is free today is another.
        living = living_size(socket_path(runtime_dir, options.name).with_suffix(".state"))
        is_its = living is not None and given.matches(living)
        size = living if living is not None and is_its else given.completed(options.model)
        owner = PoolOwner(name=options.name, size=size, runtime_dir=runtime_dir)
        with ExitStack() as undo:
            undo.push(owner)
            owner.loop.stop_on_signals()
            if options.exit_with is not None:
                owner.loop.stop_with(options.exit_with)
            owner.open()
            undo.pop_all()
    except OSError as error:
        raise PoolError(f"pool {options.name} can't be opened: {error}") from error
    return owner


def _report(ready_fd: int, error: str | None) -> None:
    with os.fdopen(ready_fd, "w") as pipe:
        pipe.write(json.dumps({"error": error}) + "\n")


def _make_parser() -> CommandParser:
    parser = CommandParser(
        "rose pool",
        "Owns the KV slabs of one GPU and hands them to the engines that attach, until a stop signal.",
        "rose pool gpu0 --model ./models/chat --model ./models/policy",
    )
    parser.add_argument("name", metavar="NAME", help="the pool's name, as in `rose serve --pool NAME`")
    parser.add_argument(
        "--model",
        type=model_name,
        action="append",
        default=[],
        metavar="MODEL",
        help="directory or hub id of a model that will share the pool; may be repeated. The models decide "
        "the sizes that are not given below",
    )
    parser.add_argument(
        "--num-slabs",
        type=int,
        metavar="N",
        help="slabs in the pool (default: as many as the models leave memory for)",
    )
    parser.add_argument(
        "--slab-bytes",
        type=int,
        metavar="N",
        help="size of a slab, a multiple of 4096, or on CUDA of 2 MiB (default: one that suits the models; "
        "without --model 2 MiB, or on CUDA 64 MiB)",
    )
    parser.add_argument(
        "--headroom-slabs",
        type=int,
        metavar="N",
        help="slabs kept free for serving's bursts (default: 20%% of the slabs)",
    )
    parser.add_argument(
        "--num-shards",
        type=int,
        default=1,
        metavar="N",
        help="ranks of each of the pool's engines, tensor-parallel times pipeline-parallel size; each rank "
        "has --num-slabs slabs (default: 1)",
    )
    parser.add_argument(
        "--backend",
        choices=[str(kind) for kind in BackendKind],
        help="where slabs live: in host memory, or shard i on the i-th visible GPU (default: cuda where the "
        "installed vLLM has a GPU to compute on, else host)",
    )
    parser.add_argument(
        "--runtime-dir", type=Path, metavar="DIR", help="folder of the socket (default: $ROSE_RUNTIME_DIR)"
    )
    parser.add_argument("--exit-with", type=int, metavar="PID", help="stop when this process ends")
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(run_command("pool", main, sys.argv[1:]))
