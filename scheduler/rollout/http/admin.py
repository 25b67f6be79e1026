"""The operator's routes: workers and jobs at run time, weight versions, RL steps, status, metrics.

Owns: /workers, /admin/*, /metrics, and /published, where trainers announce versions with their jobs' keys.
Promises: a worker's own routes can't be reached through these; the router calls them itself where needed.
Never does: check keys (guard.py).
"""

import asyncio
import time
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rose.errors import RelayError, RoseError, WorkerError
from rose.http import PUBLISHED_PATH
from rose.messages import RlStep, parse_version
from rose.scheduler.rollout.formats.bodies import BadRequest
from rose.scheduler.rollout.http.callers import Callers
from rose.scheduler.rollout.http.errors import Conflict, NotFound
from rose.scheduler.rollout.http.guard import Guard
from rose.scheduler.rollout.http.metrics import prometheus_text
from rose.scheduler.rollout.http.shared.changes import AdminChanges
from rose.scheduler.rollout.http.shared.entries import Value
from rose.scheduler.rollout.http.shared.peers import Exchange, Peers
from rose.scheduler.rollout.placing.versions import VersionMode
from rose.scheduler.rollout.router_config import RouterJob, WorkerSpec
from rose.scheduler.rollout.turn.dataplane import DataPlane
from rose.scheduler.rollout.workers.registry import rose_headers
from rose.scheduler.rollout.workers.worker import Worker
from rose.types import WeightVersion

_RL_STEP_TIMEOUT = aiohttp.ClientTimeout(total=30.0)

Message = TypeVar("Message", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class JobName(_Body):
    """The body of pause, resume and abort. Without a job it means all jobs."""

    job: str | None = None
    """The job's name. None: all jobs."""


class VersionChange(_Body):
    """The body of a change of the version rule."""

    mode: VersionMode
    """Which weight versions a turn may use."""
    max_lag: int = Field(default=1, ge=0)
    """The most versions behind the newest, under max-lag."""


class StepBegun(RlStep):
    """The body of rl_step: the step, and the newest weights that the run's publisher has published."""

    version: str | None = None
    """RUN/NUMBER of these weights. None: the publisher does not say."""
    signed: str | None = None
    """The version as the publisher has signed it (rose/signature.py); None: it is not signed."""


class Published(_Body):
    """The body of published: the newest weights that a run's publisher has published."""

    version: str
    """RUN/NUMBER of these weights."""
    signed: str | None = None
    """The version as the publisher has signed it (rose/signature.py); None: it is not signed."""


class Admin:
    def __init__(
        self, plane: DataPlane, guard: Guard, callers: Callers, changes: AdminChanges, peers: Peers
    ) -> None:
        self._plane = plane
        self._guard = guard
        self._callers = callers
        self._changes = changes
        self._peers = peers

    def add_routes(self, app: web.Application) -> None:
        router = app.router
        router.add_get("/workers", self.list_workers)
        router.add_post("/workers", self.add_worker)
        router.add_delete("/workers/{worker_id}", self.remove_worker)
        router.add_post("/workers/{worker_id}/drain", self.drain_worker)
        router.add_get("/admin/status", self.status)
        router.add_post("/admin/rl_step", self.rl_step)
        router.add_get("/admin/jobs", self.list_jobs)
        router.add_put("/admin/jobs/{job}", self.change_job)
        router.add_delete("/admin/jobs/{job}", self.forget_job)
        router.add_post("/admin/pause", self.pause)
        router.add_post("/admin/resume", self.resume)
        router.add_post("/admin/abort", self.abort)
        router.add_get("/admin/version", self.show_version)
        router.add_put("/admin/version", self.change_version)
        router.add_delete("/admin/runs/{run_id}", self.forget_run)
        router.add_post("/admin/drain", self.drain)
        router.add_post("/admin/peers", self.exchange)
        router.add_get("/metrics", self.metrics)
        router.add_post(PUBLISHED_PATH, self.published)

    # Workers ----------------------------------------------------------------------------------------------

    async def list_workers(self, _request: web.Request) -> web.Response:
        """Lists the workers with their state, load and weights."""
        return web.json_response({"workers": self._plane.status()["workers"]})

    async def add_worker(self, request: web.Request) -> web.Response:
        """Adds a worker: its URL, its kind and its number of GPUs."""
        spec = await _read(request, WorkerSpec)
        registry, run_id = self._plane.registry, self._plane.config.run_id
        try:
            worker = registry.add(spec)
        except ValueError as error:
            raise Conflict(str(error)) from error
        await registry.beat(worker)
        version = worker.weight_version
        if run_id is not None and version is not None and version.run_id != run_id:
            registry.remove(worker.id)
            raise Conflict(f"worker {worker.id} has weights {version}; this router's run is {run_id}")
        await self._note("worker", spec.model_dump(mode="json"), worker.id)
        return web.json_response({"id": worker.id, "alive": worker.is_alive}, status=201)

    async def remove_worker(self, request: web.Request) -> web.Response:
        """Removes a worker; its turns continue on others."""
        worker = self._worker(request)
        self._plane.registry.remove(worker.id)
        await self._note("worker", None, worker.id)
        return web.json_response({"removed": worker.id})

    async def drain_worker(self, request: web.Request) -> web.Response:
        """Keeps new turns from a worker; its running turns finish."""
        worker = self._worker(request)
        worker.drain()
        await self._note("worker", {**worker.spec.model_dump(mode="json"), "draining": True}, worker.id)
        return web.json_response({"draining": worker.id, "in_flight": worker.in_flight})

    def _worker(self, request: web.Request) -> Worker:
        worker_id = request.match_info["worker_id"]
        worker = self._plane.registry.get(worker_id)
        if worker is None:
            raise NotFound(f"worker {worker_id} is not registered; see GET /workers")
        return worker

    # Jobs ---------------------------------------------------------------------------------------------------

    async def list_jobs(self, _request: web.Request) -> web.Response:
        """Lists the jobs with their limits, turns and tokens."""
        return web.json_response({"jobs": self._plane.job_status()})

    async def change_job(self, request: web.Request) -> web.Response:
        """Sets those of a job's key, run, model and limits that the body names; null takes one away."""
        name, given = request.match_info["job"], await _read(request, RouterJob)
        try:
            job = self._plane.jobs.change(name, given, time.monotonic())
        except ValueError as error:
            raise Conflict(str(error)) from error
        self._plane.dispatcher.lend()
        await self._note("job", self._changes.joined("job", given.model_dump(exclude_unset=True), name), name)
        proves = self._plane.config.admin_key is not None
        return web.json_response({name: job.as_json(0, time.monotonic(), shows_proof=proves)})

    async def forget_job(self, request: web.Request) -> web.Response:
        """Closes a job's account, which frees its serving GPUs at once, and undoes its changes, so that the
        router's file applies to the job again."""
        name = request.match_info["job"]
        try:
            self._plane.jobs.forget(name)
        except KeyError as error:
            raise NotFound(f"job {name} is unknown; see GET /admin/jobs") from error
        except ValueError as error:
            raise Conflict(str(error)) from error
        self._plane.dispatcher.lend()
        await self._note("job", None, name)
        return web.json_response({"forgotten": name})

    async def pause(self, request: web.Request) -> web.Response:
        """Stops placing turns; running turns go on."""
        return await self._set_paused(request, is_paused=True)

    async def resume(self, request: web.Request) -> web.Response:
        """Places turns again after a pause."""
        return await self._set_paused(request, is_paused=False)

    async def _set_paused(self, request: web.Request, *, is_paused: bool) -> web.Response:
        name = (await _read(request, JobName)).job
        if name is None:
            self._plane.dispatcher.pause(is_paused)
        else:
            self._plane.jobs.get(name, time.monotonic()).is_paused = is_paused
            self._plane.dispatcher.pump()
        await self._note("paused", is_paused, name or "")
        return web.json_response({"job": name, "paused": is_paused})

    async def abort(self, request: web.Request) -> web.Response:
        """Ends all requests of a job, or of all jobs; their clients get 409."""
        name = (await _read(request, JobName)).job
        return web.json_response({"job": name, "aborted": self._plane.abort(name)})

    # Weights ----------------------------------------------------------------------------------------

    async def show_version(self, _request: web.Request) -> web.Response:
        """Shows which weights turns may run on, and which the workers have."""
        rule, workers = self._plane.versions, self._plane.registry.workers()
        held = {w.id: str(w.weight_version) if w.weight_version is not None else None for w in workers}
        newest = dict(rule.known.numbers)
        shown = {"mode": rule.mode.value, "max_lag": rule.max_lag, "newest": newest, "workers": held}
        return web.json_response(shown)

    async def change_version(self, request: web.Request) -> web.Response:
        """Changes which weights turns may run on."""
        change = await _read(request, VersionChange)
        self._plane.set_versions(change.mode, change.max_lag)
        await self._note("versions", change.model_dump(mode="json"))
        return await self.show_version(request)

    async def forget_run(self, request: web.Request) -> web.Response:
        """Forgets a training run that has ended, so that workers with older weights may have turns again."""
        run_id = request.match_info["run_id"]
        newest = self._plane.registry.newest
        try:
            newest.forget(run_id)
        except KeyError as error:
            raise NotFound(
                f"run {run_id} is unknown; known runs: {', '.join(sorted(newest.numbers)) or 'none'}"
            ) from error
        self._plane.dispatcher.pump()
        await self._note("step", None, run_id)
        await self._note("forgotten", None, run_id)
        return web.json_response({"forgotten": run_id})

    async def rl_step(self, request: web.Request) -> web.Response:
        """Tells all live workers that an RL step begins, so that they compute their budgets again (ROSE
        §4.1). From then on the given version is the newest: no newer weights of a worker make those of
        others too old."""
        begun = await _read(request, StepBegun)
        step, version = RlStep(step=begun.step), _version(begun.version)
        kept, run_id = begun.model_dump(exclude_none=True), version.run_id if version is not None else ""
        if version is not None and not self._is_news(version, kept):
            kept, run_id = step.model_dump(), ""
        self._plane.dispatcher.lend(begins_anew=True)
        workers = [worker for worker in self._plane.registry.workers() if worker.is_alive]
        sending = asyncio.gather(*(self._send_step(worker, step) for worker in workers))
        try:
            await self._note("step", kept, run_id)
        finally:  # the engines need it even if the disk is slow, or full
            results = await sending
        answers = {worker.id: result for worker, result in zip(workers, results, strict=True)}
        return web.json_response({"step": step.step, "workers": answers})

    async def published(self, request: web.Request) -> web.Response:
        """Takes a trainer's announcement of the weights that it has published. From now on no turn of the run
        begins on base weights, or on weights that are too old beside the announced ones. It may be sent with
        the key of the job whose run it is."""
        published = await _read(request, Published)
        version, kept = _version(published.version), published.model_dump(exclude_none=True)
        assert version is not None
        is_signed = self._plane.config.public_key is not None  # which shows who says so
        if not is_signed and not self._guard.is_open:
            self._callers.require_run(request, version.run_id)
        if not self._is_news(version, kept):
            known = self._plane.registry.newest.bound(version.run_id)
            raise Conflict(
                f"version: {version} is older than {version.run_id}/{known}, which was announced before;"
                " announce a newer one, or forget the run (DELETE /admin/runs/RUN) if it starts again"
            )
        self._plane.dispatcher.lend()  # base weights will not do any more
        await self._note("step", kept, version.run_id)
        return web.json_response({"version": str(version)})

    def _is_news(self, version: WeightVersion, kept: dict[str, Any]) -> bool:
        """Bounds the run's versions by what its publisher has announced; returns whether that is new. Raises:
        BadRequest if it is not signed, where it has to be."""
        try:
            return self._changes.announced(version, kept)
        except RelayError as error:
            raise BadRequest(f"version: {error}") from error

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

    # The router itself ------------------------------------------------------------------------------

    async def drain(self, _request: web.Request) -> web.Response:
        """Refuses new requests from now on; the process goes on until it is stopped."""
        self._guard.is_draining = True
        return web.json_response({"draining": True, "queued": self._plane.dispatcher.num_queued})

    async def status(self, _request: web.Request) -> web.Response:
        """Shows workers, jobs, queues, counters and the routers as JSON."""
        routers = {"router": self._plane.registry.name, "peers": self._peers.names}
        return web.json_response({**self._plane.status(), **routers})

    async def exchange(self, request: web.Request) -> web.Response:
        """Takes over what admins have set at another router, and answers with what they have set here."""
        said = await _read(request, Exchange)
        try:
            answer = await self._peers.told(said)
        except ValueError as error:
            raise Conflict(str(error)) from error
        except OSError as error:
            raise self._not_kept(error) from error
        return web.Response(body=answer.model_dump_json().encode(), content_type="application/json")

    async def _note(self, kind: str, value: Value, name: str = "") -> None:
        """Keeps a change that was made, for this router's next process and for its peers."""
        try:
            await self._changes.note(kind, value, name)
        except OSError as error:
            raise self._not_kept(error) from error

    def _not_kept(self, error: OSError) -> RoseError:
        file = self._plane.config.state
        return RoseError(f"done, but not kept: {file}: {error.strerror}; a restart would not know of it")

    async def metrics(self, _request: web.Request) -> web.Response:
        """Answers the router's metrics in Prometheus' text format."""
        text = prometheus_text(self._plane)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _version(text: str | None) -> WeightVersion | None:
    """Raises: BadRequest."""
    try:
        return parse_version(text)
    except WorkerError as error:
        raise BadRequest(f"version: {error}") from error


async def _read(request: web.Request, kind: type[Message]) -> Message:
    """Returns the request's body as a message; an empty body means {}. Raises: BadRequest."""
    data = await request.read()
    try:
        return kind.model_validate_json(data or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        fields = ", ".join(kind.model_fields)
        raise BadRequest(f"{key or 'body'}: {first['msg']}; allowed fields: {fields}") from error
