"""The routes as vLLM's API server gets them, without an engine behind."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import State
from starlette.testclient import TestClient
from vllm.entrypoints.rl.factories import register_rl_api_routers
from vllm.entrypoints.serve import register_vllm_dev_api_routers
from vllm.entrypoints.serve.elastic_ep.api_router import attach_router as attach_elastic_ep

from rose.engine.http.endpoint import RoseEndpoint
from rose.errors import ConfigError


def client() -> TestClient:
    app = FastAPI()
    RoseEndpoint().attach_router(app)
    return TestClient(app)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}])
def test_every_route_asks_for_the_key(monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]) -> None:
    monkeypatch.setenv("ROSE_KEY", "secret")
    with client() as http:
        for route in ("gate", "rl_step", "weights", "activate", "deactivate", "profile"):
            assert http.post(f"/rose/v1/{route}", json={}, headers=headers).status_code == 401, route
        assert http.get("/rose/v1/status", headers=headers).status_code == 401


@pytest.mark.parametrize(("key", "headers"), [("secret", {"Authorization": "Bearer secret"}), ("", {})])
def test_an_engine_without_rose_settings_says_so(
    monkeypatch: pytest.MonkeyPatch, key: str, headers: dict[str, str]
) -> None:
    monkeypatch.setenv("ROSE_KEY", key)
    with client() as http:
        answer = http.post("/rose/v1/activate", headers=headers)
    assert (answer.status_code, answer.json()["detail"]) == (404, "this engine runs without rose settings")


def test_vllms_own_routes_that_command_an_engine_ask_for_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_KEY", "secret")
    app = FastAPI(root_path="/api")
    attach_elastic_ep(app)
    for path in ("/invocations", "/generative_scoring"):
        app.post(path)(lambda: {})
    register_vllm_dev_api_routers(app)
    register_rl_api_routers(app)
    commands = {route.path for route in app.routes if isinstance(route, APIRoute)}
    assert {
        "/invocations",
        "/scale_elastic_ep",
        "/pause",
        "/update_weights",
        "/collective_rpc",
        "/sleep",
    } <= commands
    RoseEndpoint().attach_router(app)
    with TestClient(app) as http:
        for path in commands:
            for called in (path, f"{path}/", f"/api{path}"):
                assert http.post(called, json={}).status_code == 401, called
                assert http.get(called).status_code == 401, called
        allowed = {"Authorization": "Bearer secret"}
        assert http.get("/update_weights", headers=allowed).status_code == 405
        assert http.get("/health").status_code == 404, "it is not in this app, and not asked for a key"


async def test_an_engine_that_vllm_starts_everywhere_without_a_key_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ROSE_KEY", raising=False)
    config = SimpleNamespace(additional_config={"rose": {"role": "rollout"}})
    client: Any = SimpleNamespace(vllm_config=config)
    for host in (None, "0.0.0.0"):
        with pytest.raises(ConfigError, match=r"set ROSE_KEY, listen on 127\.0\.0\.1, or give --insecure"):
            await RoseEndpoint().init_state(client, State(), Namespace(host=host, uds=None))
