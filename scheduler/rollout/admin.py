"""The operator's side: workers at run time, RL steps, status, metrics.

Owns: /workers, /admin/*, /metrics.
Promises: the admin key, where set, is asked on /workers and /admin.
Never does: hand a worker's own routes through; it calls them itself where needed.
"""

import asyncio
import json

import aiohttp
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rose.scheduler.rollout.config import WorkerSpec
from rose.scheduler.rollout.counters import prometheus_text
from rose.scheduler.rollout.dataplane import DataPlane
from rose.scheduler.rollout.passthrough import error_body
from rose.scheduler.rollout.registry import rose_headers
from rose.scheduler.rollout.worker import Worker

_RL_STEP_TIMEOUT = aiohttp.ClientTimeout(total=30.0)


class RlStep(BaseModel):
    model_config = ConfigDict(extra="forbid")
    step: int = Field(ge=0)


class Admin:
    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/workers", self.list_workers)
        app.router.add_post("/workers", self.add_worker)
        app.router.add_delete("/workers/{worker_id}", self.remove_worker)
        app.router.add_get("/admin/status", self.status)
        app.router.add_post("/admin/rl_step", self.rl_step)
        app.router.add_get("/metrics", self.metrics)

    async def list_workers(self, _request: web.Request) -> web.Response:
        return web.json_response({"workers": self._plane.status()["workers"]})

    async def add_worker(self, request: web.Request) -> web.Response:
        try:
            spec = WorkerSpec.model_validate(await request.json())
            worker = self._plane.registry.add(spec)
        except (ValidationError, json.JSONDecodeError) as error:
            return web.json_response(error_body(400, f"want {{url, kind, gpus}}: {error}"), status=400)
        except ValueError as error:
            return web.json_response(error_body(409, str(error)), status=409)
        return web.json_response({"id": worker.id}, status=201)

    async def remove_worker(self, request: web.Request) -> web.Response:
        worker_id = request.match_info["worker_id"]
        try:
            self._plane.registry.remove(worker_id)
        except KeyError:
            return web.json_response(error_body(404, f"no worker {worker_id}"), status=404)
        return web.json_response({"removed": worker_id})

    async def status(self, _request: web.Request) -> web.Response:
        return web.json_response(self._plane.status())

    async def metrics(self, _request: web.Request) -> web.Response:
        plane = self._plane
        text = prometheus_text(plane.counters, plane.registry, plane.dispatcher)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def rl_step(self, request: web.Request) -> web.Response:
        """Tell all live workers that a new RL step begins: they recompute their budgets (ROSE §4.1)."""
        try:
            step = RlStep.model_validate(await request.json())
        except (ValidationError, json.JSONDecodeError) as error:
            return web.json_response(error_body(400, f'want {{"step": n}}: {error}'), status=400)
        self._plane.dispatcher.lend_anew()
        workers = [worker for worker in self._plane.registry.workers() if worker.is_alive]
        results = await asyncio.gather(*(self._send_step(worker, step) for worker in workers))
        answers = {worker.id: result for worker, result in zip(workers, results, strict=True)}
        return web.json_response({"step": step.step, "workers": answers})

    async def _send_step(self, worker: Worker, step: RlStep) -> str:
        if not worker.has_rose_routes:
            return "no /rose/v1 on this worker"
        url = f"{worker.spec.url}/rose/v1/rl_step"
        headers = rose_headers(self._plane.config)
        try:
            async with self._plane.http.post(
                url, json=step.model_dump(), headers=headers, timeout=_RL_STEP_TIMEOUT
            ) as response:
                return "ok" if response.status == 200 else f"answered {response.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
