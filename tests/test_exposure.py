"""What listens beyond this machine wants keys, whatever command starts it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import httpx
import pytest
import yaml

from rose.errors import ConfigError
from rose.ports import check_exposure, free_port
from tests.commands import rose

EVERYWHERE = "0.0.0.0"
KEYS = {"ROSE_ROUTER_API_KEY": "cli", "ROSE_ROUTER_ADMIN_KEY": "adm"}


@pytest.fixture(autouse=True)
def no_key_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("host", "is_open"),
    [
        ("127.0.0.1", False),
        ("127.8.9.1", False),
        ("::1", False),
        ("[::1]", False),
        ("localhost", False),
        (EVERYWHERE, True),
        ("::", True),
        ("", True),
        ("10.0.0.7", True),
        ("gpu1.example.com", True),
    ],
)
def test_only_addresses_of_this_machine_itself_need_no_key(host: str, is_open: bool) -> None:
    for keys in ({"ROSE_KEY": None}, {"ROSE_KEY": ""}, {"ROSE_KEY": "k", "OTHER": None}, {}):
        with pytest.raises(ConfigError) if is_open else contextlib.nullcontext():
            check_exposure("--host", host, keys, is_insecure=False)
        check_exposure("--host", host, keys, is_insecure=True)
    check_exposure("--host", host, {"ROSE_KEY": "k"}, is_insecure=False)


def model(folder: Path) -> str:
    path = folder / "model"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    return str(path)


def node_file(folder: Path) -> str:
    engine = {"model": model(folder), "role": "rollout", "port": free_port(), "host": EVERYWHERE}
    path = folder / "node.yaml"
    path.write_text(yaml.safe_dump({"pool": {"name": "exposed"}, "engines": [engine]}))
    return str(path)


def ray_file(folder: Path, **services: object) -> str:
    path = folder / "ray.yaml"
    path.write_text(yaml.safe_dump({"router": None, **services}))
    return str(path)


def ray_node(folder: Path) -> dict[str, object]:
    node = yaml.safe_load(Path(node_file(folder)).read_text())
    del node["engines"][0]["host"]  # then it is the Ray node's
    return {"config": node}


Make = Callable[[Path], list[str]]
COMMANDS: dict[str, tuple[Make, list[str]]] = {
    "router": (lambda _: ["router", "--host", EVERYWHERE], ["ROSE_ROUTER_API_KEY", "ROSE_ROUTER_ADMIN_KEY"]),
    "relay": (lambda _: ["relay", "--host", EVERYWHERE], ["ROSE_KEY"]),
    "mooncake": (lambda _: ["relay", "--kind", "mooncake", "--host", EVERYWHERE], []),
    "dashboard": (
        lambda _: ["sched", "dashboard", "--http", f"{EVERYWHERE}:{free_port()}"],
        ["ROSE_DASHBOARD_KEY"],
    ),
    "sched serve": (
        lambda _: ["sched", "serve", "--http", f"{EVERYWHERE}:{free_port()}"],
        ["ROSE_DASHBOARD_KEY"],
    ),
    "ray relay": (lambda f: ["ray", "up", ray_file(f, relay={})], ["ROSE_KEY"]),
    "ray router": (
        lambda f: ["ray", "up", ray_file(f, router={})],
        ["ROSE_ROUTER_API_KEY", "ROSE_ROUTER_ADMIN_KEY"],
    ),
    "ray engine": (
        lambda f: ["ray", "up", ray_file(f, nodes=[ray_node(f)])],
        ["ROSE_KEY", "ROSE_WORKER_API_KEY"],
    ),
}
OF_ENGINES: dict[str, Make] = {
    "serve": lambda f: ["serve", model(f), "--role", "rollout", "--host", EVERYWHERE],
    "node": lambda f: ["node", node_file(f)],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_refuses_to_listen_everywhere_without_keys(name: str, tmp_path: Path) -> None:
    make, keys = COMMANDS[name]
    assert_refused(rose(*make(tmp_path)), keys)


@pytest.mark.vllm
@pytest.mark.parametrize("name", OF_ENGINES)
def test_an_engine_refuses_to_listen_everywhere_without_keys(name: str, tmp_path: Path) -> None:
    arguments = [*OF_ENGINES[name](tmp_path)]
    if name == "serve":
        arguments += ["--port", str(free_port())]
    assert_refused(rose(*arguments), ["ROSE_KEY", "ROSE_WORKER_API_KEY"])
    assert_refused(rose(*arguments, environment={"ROSE_KEY": "k"}), ["ROSE_WORKER_API_KEY"])
    if name == "serve":
        both = {"ROSE_KEY": "k", "ROSE_WORKER_API_KEY": "w"}
        refused = rose(*arguments, "--api-key", "", environment=both)
        assert (refused.returncode, "--api-key is empty" in refused.stderr) == (2, True), refused.stderr


def assert_refused(result: subprocess.CompletedProcess[str], keys: list[str]) -> None:
    (line,) = result.stderr.strip().splitlines()
    assert result.returncode == 2 and line.startswith("rose: error: "), line
    assert line.endswith("listen on 127.0.0.1, or give --insecure"), line
    assert [key for key in keys if key not in line] == []
    assert ("knows no keys" in line) == (not keys)


@contextlib.contextmanager
def listening(*arguments: str, **environment: str) -> Iterator[str]:
    """Where a command that listens everywhere says that it does."""
    argv = [sys.executable, "-m", "rose.cli", *arguments, "--host", EVERYWHERE]
    with Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def test_a_router_with_keys_listens_everywhere_and_asks_for_them() -> None:
    with listening("router", "--port", "0", **KEYS) as line:
        url = f"http://127.0.0.1:{line.rpartition(':')[2]}"
        assert httpx.get(f"{url}/v1/models").status_code == httpx.codes.UNAUTHORIZED
        assert httpx.get(f"{url}/workers").status_code == httpx.codes.UNAUTHORIZED
        admin = {"Authorization": "Bearer adm"}
        assert httpx.get(f"{url}/workers", headers=admin).json() == {"workers": []}


def test_who_insists_gets_a_relay_without_keys() -> None:
    with listening("relay", "--insecure") as line:
        _, _, port = json.loads(line)["url"].rpartition(":")
        socket.create_connection(("127.0.0.1", int(port)), timeout=60).close()
