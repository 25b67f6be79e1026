"""`rose ray` on a local Ray cluster of three nodes: what is placed where, what answers, what is left."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
import yaml
from ray.cluster_utils import Cluster

from rose.config import load_yaml
from rose.errors import ConfigError, WorkerError
from rose.ports import free_port
from rose.ray import actors as services
from rose.ray.command import main
from rose.ray.process_actor import ProcessActor
from rose.ray.ray_config import RayConfig
from tests.scheduler.rollout.tiny_model import make_tiny_qwen3

STORE_BYTES = 80 << 20
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster that has one CPU on each of three nodes."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers inherit it. Their engine compiles what vLLM compiles, which other tests turn off.
        patch.setenv("ROSE_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        patch.delenv("TORCHDYNAMO_DISABLE")
        nodes: Any = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
        local = Cluster()
        try:
            for number in range(3):
                add_node(local, **nodes, **({"include_dashboard": False} if number == 0 else {}))
            local.wait_for_nodes(timeout=PATIENCE_S)
            services.connect(local.address)
            yield local.address
        finally:
            ray.shutdown()
            local.shutdown()


def test_what_a_process_is_told_is_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path))
    actor = ProcessActor("router", {}, is_insecure=False)
    left = tmp_path / "ray-router" / "process.yaml"
    left.touch(mode=0o644)
    assert actor._write({"api_key": "secret"}) == left
    assert left.stat().st_mode & 0o777 == 0o600


def add_node(cluster: Cluster, **arguments: Any) -> None:
    """Tries it again on a busy machine: Ray gives a node 30 s to start, which no setting changes."""
    for attempts_left in reversed(range(4)):
        try:
            cluster.add_node(wait=False, **arguments)
            return
        except Exception as error:  # Ray has no type for it
            if attempts_left == 0 or "timed out during startup" not in str(error):
                raise


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    def write(**content: Any) -> Path:
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def told(name: str) -> dict[str, dict[str, Any]]:
    return {service: found for service, found in services.status(name).items() if found is not None}


@pytest.mark.vllm
@pytest.mark.slow
def test_services_are_spread_over_the_nodes_and_serve_turns_without_ray(
    address: str, config_file: Callable[..., Path], tmp_path: Path
) -> None:
    vllm_args = ["--served-model-name", "tiny", "--enforce-eager", "--max-model-len", "256"]
    engine = {"model": str(make_tiny_qwen3(tmp_path / "model")), "role": "rollout", "port": free_port()}
    pool = {"name": f"ray-{os.getpid()}", "num_slabs": 24, "slab_bytes": 1 << 20, "headroom_slabs": 4}
    node = {"config": {"pool": pool, "engines": [{**engine, "vllm_args": vllm_args}]}}
    file = config_file(
        name="all",
        strategy="STRICT_SPREAD",
        relay={"config": {"capacity_bytes": 64 << 20}},
        router={"config": {"port": 0}},
        nodes=[node],
    )
    endpoints = services.up(load_yaml(file, RayConfig), keys={}, is_insecure=True)
    try:
        status = told("all")
        assert sorted(status) == ["node-0", "relay", "router"]
        assert len({each["node"] for each in status.values()}) == 3
        assert endpoints.relay_url is not None and endpoints.router_url is not None
        health = f"{endpoints.router_url}/health"
        until(lambda: httpx.get(health, timeout=PATIENCE_S, trust_env=False).is_success)
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True}
        answer = httpx.post(
            f"{endpoints.router_url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False
        )
        (choice,) = answer.json()["choices"]
        assert len(choice["token_ids"]) == 4
        assert f"http://{choice['rose']['spans'][0]['worker']}" in endpoints.workers
        # The router answers from a process of its own, which no actor of Ray shares.
        router = psutil.Process(status["router"]["pid"])
        assert "rose.scheduler.rollout.http.command" in router.cmdline()
        shown = cli("status", "all", "--address", address)
        assert shown.returncode == 0 and str(endpoints.router_url) in shown.stdout
        with pytest.raises(ConfigError, match="rose ray down all"):
            services.up(load_yaml(file, RayConfig), keys={}, is_insecure=True)
    finally:
        assert sorted(services.down("all")) == ["node-0", "relay", "router"]
    assert not any(psutil.pid_exists(each["pid"]) for each in status.values())
    assert services.status("all") == {} and services.num_placed("all") == 0


def cli(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rose.cli", "ray", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.slow
def test_a_process_ends_with_its_actor_and_the_status_says_so(
    address: str, config_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(services, "connect", lambda _address: None)  # this process has joined already
    file = config_file(name="one", relay={"config": {"capacity_bytes": 64 << 20}}, router=None)
    assert main(["up", str(file), "--address", address, "--insecure"]) == 0
    try:
        endpoints = json.loads(capsys.readouterr().out)
        assert endpoints["relay_url"].startswith("embedded://")
        pid = told("one")["relay"]["pid"]
        ray.kill(ray.get_actor("relay", namespace="rose-one"))
        until(lambda: not psutil.pid_exists(pid))
        until(lambda: services.status("one") == {})
        assert main(["status", "one"]) == 1
        assert "1 gone" in capsys.readouterr().out
    finally:
        main(["down", "one"])
    assert services.num_placed("one") == 0


@pytest.mark.slow
def test_a_service_that_does_not_start_takes_the_others_down_and_shows_its_log(
    address: str, config_file: Callable[..., Path]
) -> None:
    pool = {"name": "broken", "num_slabs": 4, "headroom_slabs": 1}
    engine = {"model": "/no/such/model", "role": "rollout", "port": free_port()}
    file = config_file(
        name="broken",
        relay={"config": {"capacity_bytes": 64 << 20}},
        nodes=[{"config": {"pool": pool, "engines": [engine]}}],
    )
    with pytest.raises(WorkerError, match="/no/such/model"):
        services.up(load_yaml(file, RayConfig), keys={}, is_insecure=True)
    assert services.status("broken") == {} and services.num_placed("broken") == 0


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_numbers(
    address: str, config_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "PLACE_TIMEOUT_S", 0.5)
    file = config_file(name="large", router={"num_cpus": 2})
    with pytest.raises(ConfigError, match=r"large: no room .* router \{'CPU': 2.0\} .*'CPU': 1.0"):
        services.up(load_yaml(file, RayConfig), keys={}, is_insecure=True)
    assert services.status("large") == {} and services.num_placed("large") == 0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"router": None}, "no service"),
        ({"router": {"num_cpus": 0}}, "asks for no resources"),
        ({"router": {"config": {"policy": "best"}}}, "router.config.policy"),
        ({"nodes": [{"config": {"engines": []}}]}, "pool"),
        ({"name": "Not a name"}, "name"),
        ({"rooter": {}}, "did you mean router"),
    ],
)
def test_a_bad_file_is_refused_with_the_key(
    content: dict[str, Any], problem: str, config_file: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_yaml(config_file(**content), RayConfig)
