"""The routes as vLLM's API server gets them, without an engine behind."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from fastapi import FastAPI
from starlette.testclient import TestClient

from rose.engine.http.endpoint import RoseEndpoint


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
