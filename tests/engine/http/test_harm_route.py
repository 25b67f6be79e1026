"""The routes of a serving engine in a pool, whose scheduler, records and board are real; no model runs."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from fastapi import FastAPI
from lone_schedulers import pooled_scheduler
from starlette.testclient import TestClient

from rose.config import Settings
from rose.engine.http.control import ServedEngine
from rose.engine.http.endpoint import RoseEndpoint, _own_url
from rose.messages import HarmHistory, WorkerStatus
from rose.node.control import urls_on_this_host
from rose.types import Role

pytestmark = pytest.mark.vllm


def test_a_serving_engine_reports_its_harm_and_is_found_on_its_host(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    client: Any = object()
    with pooled_scheduler(tmp_path, Role.SERVING) as scheduler:
        control = ServedEngine(client, scheduler.rose, "m")
        control.listens_at(_own_url(Namespace(host="0.0.0.0", port=8000, uds=None, ssl_certfile=None)))
        app = FastAPI()
        app.state.rose = control
        RoseEndpoint().attach_router(app)
        with TestClient(app) as http:
            harm = HarmHistory.model_validate(http.get("/rose/v1/harm").json())
            status = WorkerStatus.model_validate(http.get("/rose/v1/status").json())
        assert harm.note == "no rollout engine is attached" and harm.slo_ttft_ms == 500
        assert len(harm.hours) == 1 and harm.slo_problem is None
        assert status.harm is not None and status.harm.hour == harm.hours[0]
        assert urls_on_this_host(Settings.from_environment()) == ["http://127.0.0.1:8000"]
    assert urls_on_this_host(Settings.from_environment()) == []
