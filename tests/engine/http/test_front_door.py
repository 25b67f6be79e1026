"""What the middleware of an engine's API server answers by itself, and what it leaves to vLLM."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from rose.engine.http.control import ServedEngine
from rose.engine.http.endpoint import RoseEndpoint
from rose.engine.settings import EngineSettings
from rose.engine.status import StatusPage, page_path
from rose.types import Role

LONG = "x" * 200_000


@pytest.fixture
def http(runtime_dir: Path) -> Iterator[TestClient]:
    """An API server that answers with the body it was sent, under ROSE."""
    app = FastAPI()

    @app.post("/v1/completions")
    @app.post("/inference/v1/generate")
    async def completions(request: Request) -> Any:
        body = await request.body()
        short = {"length": len(body), "text": body[:80].decode()}
        return {**short, "whole": body.decode()} if "x-rose-tenant" in request.headers else short

    page = StatusPage(page_path(runtime_dir, "e"), create=True)
    engine: Any = object()
    app.state.rose = ServedEngine(engine, EngineSettings(role=Role.SERVING, engine_id="e"), "m")
    RoseEndpoint().attach_router(app)
    with TestClient(app) as client:
        yield client
    page.close()


@pytest.mark.parametrize("value", ["-1", "0", '"soon"', "NaN", "-Infinity", "[100]", "null", "1e999"])
@pytest.mark.parametrize("key", ["rose_ttft_ms", "rose_tpot_ms"])
def test_an_slo_that_is_no_latency_answers_400_with_the_value_and_what_is_allowed(
    http: TestClient, key: str, value: str
) -> None:
    body = f'{{"prompt": "{LONG}", "vllm_xargs": {{"{key}": {value}, "other": 1}}}}'
    answer = http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "BadRequestError" and error["code"] == 400
    assert f"vllm_xargs.{key} is {json.loads(value)!r}: send milliseconds above 0" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt": "a"}',
        '{"prompt": "a", "vllm_xargs": {"rose_ttft_ms": 200, "rose_tpot_ms": "20.5"}}',
        '{"prompt": "rose_ttft_ms", "vllm_xargs": {"other": -1}}',
        '{"prompt": "rose_ttft_ms"}',
        '{"vllm_xargs": "rose_ttft_ms"}',
        '["rose_ttft_ms"]',
        "rose_ttft_ms: not JSON",
        "",
    ],
)
def test_every_other_body_reaches_vllm_unchanged(http: TestClient, body: str) -> None:
    answer = http.post("/v1/completions", content=body)
    assert (answer.status_code, answer.json()) == (200, {"length": len(body), "text": body[:80]})


def test_a_long_body_that_comes_in_pieces_reaches_vllm_whole(http: TestClient) -> None:
    pieces = [b'{"prompt": "', LONG.encode(), b'", "vllm_xargs": {"rose_ttft_', b'ms": 200}}']
    answer = http.post("/v1/completions", content=iter(pieces))
    assert (answer.status_code, answer.json()["length"]) == (200, sum(map(len, pieces)))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"prompt": "a"}', {"rose_tenant": "search"}),
        ('{"prompt": "a", "vllm_xargs": null}', {"rose_tenant": "search"}),
        (
            '{"vllm_xargs": {"rose_ttft_ms": 200, "rose_tenant": "of the client"}}',
            {"rose_ttft_ms": 200, "rose_tenant": "search"},
        ),
    ],
)
def test_the_tenant_of_the_header_reaches_the_scheduler_with_the_body(
    http: TestClient, body: str, expected: dict[str, Any]
) -> None:
    answer = http.post("/v1/completions", content=body, headers={"X-Rose-Tenant": "search"}).json()
    assert json.loads(answer["whole"])["vllm_xargs"] == expected


def test_generate_has_its_keys_and_its_tenant_within_its_sampling_params(http: TestClient) -> None:
    path, given = "/inference/v1/generate", {"extra_args": {"rose_ttft_ms": 200}, "seed": 1}
    body: dict[str, Any] = {"token_ids": [1], "sampling_params": given}
    answer = http.post(path, json=body, headers={"X-Rose-Tenant": "search"}).json()
    given["extra_args"] = {"rose_ttft_ms": 200, "rose_tenant": "search"}
    assert json.loads(answer["whole"]) == body
    given["extra_args"] = {"rose_ttft_ms": -1}
    answer = http.post(path, json=body)
    assert (answer.status_code, "rose_ttft_ms is -1" in answer.text) == (400, True)


@pytest.mark.parametrize("body", ["", "[1]", '{"vllm_xargs": "search"}', "not JSON"])
def test_a_body_that_can_carry_no_tenant_reaches_vllm_unchanged(http: TestClient, body: str) -> None:
    answer = http.post("/v1/completions", content=body, headers={"X-Rose-Tenant": "search"}).json()
    assert answer["whole"] == body


def test_a_request_below_the_root_path_is_seen(http: TestClient) -> None:
    app: Any = http.app
    app.root_path = "/api"
    answer = http.post("/api/v1/completions", json={}, headers={"X-Rose-Tenant": "x" * 65})
    assert answer.status_code == 400


def test_a_header_that_is_no_tenants_name_answers_400(http: TestClient) -> None:
    answer = http.post("/v1/completions", json={}, headers={"X-Rose-Tenant": "x" * 65})
    assert answer.status_code == 400
    assert "X-Rose-Tenant is 'xxx" in answer.json()["error"]["message"]
    assert "send a printable name of 1 to 64 bytes" in answer.json()["error"]["message"]


ASKS = [
    *('{"prompt_logprobs": 0}', '{"echo": true, "logprobs": 1, "max_tokens": 1}'),
    *('{"sampling_params": {"prompt_logprobs": 0}}', '{"prompt_logprobs": 0, "sampling_params": [1]}'),
]
ASKS_NOT = ['{"echo": true}', '{"prompt_logprobs": null, "echo": false, "logprobs": 1}', '"echo"', '{"echo"']


@pytest.mark.parametrize("body", ASKS + ASKS_NOT)
def test_what_would_end_an_engine_with_adapters_on_a_cpu_answers_400(http: TestClient, body: str) -> None:
    assert http.post("/v1/completions", content=body).status_code == 200
    app: Any = http.app
    app.state.rose.fails_prompt_logprobs = True
    answer = http.post("/v1/completions", content=body)
    assert answer.status_code == (400 if body in ASKS else 200)
    assert ("ask an engine without adapters" in answer.text) == (body in ASKS)


@pytest.mark.parametrize("path", ["/v1/messages", "/inference/v1/generate", "/invocations"])
def test_every_route_that_generates_is_seen(http: TestClient, path: str) -> None:
    answer = http.post(path, json={}, headers={"X-Rose-Tenant": "x" * 65})
    assert answer.status_code == 400
    assert "X-Rose-Tenant" in answer.json()["error"]["message"]
