"""What bench_router.py measures and measures with: stub worker, routers, requests. bench_failover.py starts
peers with it.

Owns: processes and their pinning, the requests' bodies. Promises: everything started is stopped, also on
failure; a router is ready when it is handed out. Never: measures.
"""

import argparse
import asyncio
import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx
import psutil
import uvloop

from lib.cpu_times import read_times
from lib.load.requests import Target
from rose.config import child_environment
from rose.errors import WorkerError
from rose.ports import free_port

STUB = Path(__file__).with_name("stub_worker.py")
PASSTHROUGH = Path(__file__).with_name("bare_passthrough.py")
FLOOR = "aiohttp floor"
FLOOR_COMMAND = f"{FLOOR}={sys.executable} {PASSTHROUGH} --worker {{worker}} --port {{port}}"
COMPLETIONS_PATH = "/v1/completions"
BODIES = {"0.7KB": 120, "48KB": 8_192, "190KB": 32_768}
"""Prompt tokens."""
START_S = 30.0

Result = TypeVar("Result")


def add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[,PATH]=COMMAND",
        help="a router to run beside ours",
    )


def peer_name(spec: str) -> str:
    return spec.partition("=")[0].partition(",")[0]


def peer_path(spec: str) -> str:
    """Returns the path on which a peer takes completions."""
    return spec.partition("=")[0].partition(",")[2] or COMPLETIONS_PATH


@contextmanager
def stub(**flags: object) -> Iterator[tuple[str, psutil.Process]]:
    """A stub worker's URL and process."""
    argv = [sys.executable, str(STUB)]
    for name, value in flags.items():
        argv.append(f"--{name.replace('_', '-')}")
        if value is not True:
            argv.append(str(value))
    with _started(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip(), psutil.Process(process.pid)


@contextmanager
def router(worker: str, cpu: int, *, has_tls: bool = False) -> Iterator[tuple[str, psutil.Process]]:
    """Our router before one worker, ready. `has_tls`: whether it serves HTTPS alone."""
    port = free_port()
    argv = [
        sys.executable,
        "-m",
        "rose.scheduler.rollout.http.command",
        "--port",
        str(port),
        "--worker",
        worker,
    ]
    with TemporaryDirectory(prefix="rose-bench-") as folder:
        if has_tls:
            argv += _certificate_flags(Path(folder))
        with _listening(argv, port, cpu, "https" if has_tls else "http") as ready:
            yield ready


def _certificate_flags(folder: Path) -> list[str]:
    """Makes a certificate for loopback, and returns the router's flags that name it."""
    certificate, key = folder / "shown.pem", folder / "shown.key"
    made = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=rose"
        f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    )
    subprocess.run(shlex.split(made), check=True, capture_output=True)
    return ["--tls-certificate", str(certificate), "--tls-key", str(key)]


@contextmanager
def other_router(
    spec: str, workers: Sequence[str], cpu: int | None = None
) -> Iterator[tuple[str, psutil.Process]]:
    """A router of another's before workers, ready. `spec`: NAME[,PATH]=COMMAND; {worker} is all of them."""
    port = free_port()
    argv = shlex.split(spec.partition("=")[2].format(worker=" ".join(workers), port=port))
    with _listening(argv, port, cpu) as ready:
        yield ready


@contextmanager
def _started(
    argv: Sequence[str], cpu: int | None = None, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(argv, **options) as process:
        try:
            if cpu is not None:
                psutil.Process(process.pid).cpu_affinity([cpu])
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _listening(
    argv: Sequence[str], port: int, cpu: int | None, scheme: str = "http"
) -> Iterator[tuple[str, psutil.Process]]:
    url = f"{scheme}://127.0.0.1:{port}"
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with (
        TemporaryDirectory(prefix="rose-bench-") as state,
        _started(argv, cpu, env=child_environment({"ROSE_STATE_DIR": state}), **quiet) as process,
    ):
        until = time.monotonic() + START_S
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > until:
                raise WorkerError(f"{shlex.join(argv)} did not become ready in {START_S:.0f} s")
            time.sleep(0.1)
        yield url, psutil.Process(process.pid)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=1.0, verify=False).status_code == 200
    except httpx.HTTPError:
        return False


def run(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def cpu_s(process: psutil.Process) -> float:
    """CPU of a process, its children and their threads so far, without threads that ended.

    By the scheduler's count: a round of requests is but a dozen of the clock's ticks.
    """
    processes = [process, *process.children(recursive=True)]
    tasks = [f"/proc/{each.pid}/task/{thread.id}" for each in processes for thread in each.threads()]
    return sum(read_times(f"{task}/schedstat").ran_s for task in tasks)


def requests_for(
    target: Target, num_tokens: int, count: int, rng: random.Random, **fields: object
) -> list[bytes]:
    """Requests whose prompts differ from the first id on; a session each, as a trainer sends."""
    rest = ",".join(str(rng.randrange(150_000)) for _ in range(num_tokens - 1))
    made = []
    for number in range(count):
        key = "prompt"
        body: dict[str, object] = {"model": "stub", "max_tokens": 64, "temperature": 1.0, **fields}
        if target.path == "/generate":
            key, body = "input_ids", {"sampling_params": {"max_new_tokens": 64}}
        others = json.dumps(body, separators=(",", ":"))
        data = f'{{"{key}":[{number},{rest}],{others[1:]}'.encode()
        made.append(target.request(data, f"X-Session-ID: s{number}\r\n"))
    return made
