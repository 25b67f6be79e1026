"""A job with a Ray instance of its own: ``python -m rose.jobs.ray_job --num-cpus 2 -- COMMAND ...``.

Owns one Ray head, its ports, its folder and its token. The command finds it by ``RAY_ADDRESS`` and shares it
with nobody, whatever the user has set for Ray. Both run in the session that this process leads, and Ray ends
with the command, whose exit status is returned. Thus a crash or a full object store of one job does not
affect another. Source: WEAVE §5.1, fault isolation.
"""

import argparse
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from rose.arguments import CommandParser, run_command
from rose.config import child_environment
from rose.errors import ConfigError, WorkerError, install_hint
from rose.node import watcher
from rose.node.signals import StopOnSignals
from rose.ports import free_port

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""The time that Ray's processes have to end after the command."""
POLL_S = 0.05
LOOPBACK = "127.0.0.1"


def start_ray(arguments: argparse.Namespace, folder: str, environment: Mapping[str, str]) -> str:
    """Returns the address of a Ray that answers. Raises: WorkerError with what `ray start` printed."""
    port, client_port, agent_port = free_port(), free_port(), free_port()
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"]
    argv += [f"--node-ip-address={LOOPBACK}", f"--port={port}", f"--ray-client-server-port={client_port}"]
    argv += [f"--dashboard-agent-listen-port={agent_port}", "--include-dashboard=false"]
    argv += ["--min-worker-port=0", "--max-worker-port=0"]  # the kernel's choice: no range to share
    argv += [f"--temp-dir={folder}", f"--num-cpus={arguments.num_cpus}", f"--num-gpus={arguments.num_gpus}"]
    if arguments.object_store_gb is not None:
        argv.append(f"--object-store-memory={round(arguments.object_store_gb * 1e9)}")
    started = subprocess.run(
        argv,
        env=child_environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if started.returncode != 0:
        raise WorkerError(f"ray start ended with status {started.returncode}:\n{started.stdout.strip()}")
    return f"{LOOPBACK}:{port}"


def end_others() -> None:
    """Ends all other processes of our own session."""
    deadline = time.monotonic() + GRACE_S
    signum = signal.SIGTERM
    while others := [pid for pid in watcher.group_members(os.getpid()) if pid != os.getpid()]:
        for pid in others:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:  # it ended since we listed it
                continue
        if time.monotonic() >= deadline:
            signum = signal.SIGKILL
        time.sleep(POLL_S)


def main(argv: Sequence[str]) -> int:
    """Runs the command beside its Ray until the command or this process ends."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if find_spec("ray") is None:
        raise ConfigError(f"the job's file asks for Ray, which is not installed; {install_hint('ray')}")
    if shutil.which(arguments.command[0]) is None:  # before Ray, whose start takes many seconds
        raise ConfigError(f"can't start {arguments.command}: no program {arguments.command[0]!r}")
    # Ray's sockets are in it, and a socket's path may have 107 characters.
    folder = tempfile.mkdtemp(prefix="rose-ray-", dir="/tmp")
    status = 128 + signal.SIGTERM
    try:
        with StopOnSignals():
            # Else `ray start` takes the token of the user's home where there is one, and the command none.
            token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
            address = start_ray(arguments, folder, token)
            logger.info("ray started address=%s cpus=%d", address, arguments.num_cpus)
            environment = child_environment({"RAY_ADDRESS": address, **token})
            command = subprocess.Popen(arguments.command, env=environment)
            status = command.wait()
    except OSError as error:
        raise ConfigError(f"can't start {arguments.command}: {error}") from error
    finally:
        end_others()
        shutil.rmtree(folder, ignore_errors=True)
    return status if status >= 0 else 128 - status


def _parser() -> CommandParser:
    parser = CommandParser(
        "python -m rose.jobs.ray_job",
        "Runs a job's command beside a Ray of its own; started by the runner for a job whose file has `ray`.",
        "python -m rose.jobs.ray_job --num-cpus 2 -- python train.py",
    )
    parser.add_argument("--num-cpus", type=int, default=1, help="CPUs of its Ray (default: %(default)s)")
    parser.add_argument("--num-gpus", type=int, default=0, help="GPUs of its Ray (default: %(default)s)")
    parser.add_argument("--object-store-gb", type=float, help="memory of its object store (default: Ray's)")
    parser.add_argument("command", nargs="+", help="what the job runs")
    return parser


if __name__ == "__main__":
    sys.exit(run_command("ray job", main, sys.argv[1:]))
