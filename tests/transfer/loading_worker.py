"""A worker that loads the weights that a subscriber tells it to, over HTTP."""

import asyncio
import os
import threading
from pathlib import Path

from aiohttp import web

from rose.engine.http.loaned_run import LoanedRun
from rose.messages import WeightUpdate
from rose.transfer.format.shared_planes import PlanesFile


class LoadingWorker:
    """Serves from its own thread and records what it was told to load; refuses while `is_refusing`."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.refused = 0
        self.updates: list[WeightUpdate] = []
        self.files: list[list[str]] = []
        self.is_refusing = False
        self.is_hanging = False
        self.hung = 0
        self.may_load = threading.Event()
        self.may_load.set()
        self.version: str | None = None
        self.waits_s: list[float] = []
        """The waits that were asked for at that route."""
        self._is_restarting = threading.Event()
        self.loan: LoanedRun | None = None
        """The run that it is to follow; None: it has no such route."""
        app = web.Application()
        app.router.add_post("/rose/v1/weights", self._load)
        app.router.add_get("/rose/v1/status", self._status)
        app.router.add_get("/rose/v1/loan", self._asked)
        self._runner = web.AppRunner(app)
        self._stopping = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version, "role": "rollout"})

    async def _asked(self, request: web.Request) -> web.Response:
        if self.loan is None:
            return web.Response(status=404)
        if self._is_restarting.is_set():
            self._is_restarting.clear()
            return web.Response(status=503)
        asked = request.query
        wait_s = float(asked["wait_s"])
        self.waits_s.append(wait_s)
        return web.json_response(
            {"run": await self.loan.asked(asked.get("knows"), asked.get("problem"), wait_s)}
        )

    def lend(self, run: str | None) -> None:
        """Lends it to a job of this run."""
        assert self.loan is not None
        self._loop.call_soon_threadsafe(self.loan.name, run)

    def restart(self) -> None:
        """Loses its weights, and does not answer the next question for its run."""
        self.version = None
        self._is_restarting.set()

    async def _load(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.Response(status=401)
        if self.is_hanging:
            self.hung += 1
            await self._stopping.wait()
        if self.is_refusing:
            self.refused += 1
            return web.json_response({"error": "busy"}, status=503)
        update = WeightUpdate.model_validate_json(await request.read())
        if self.loan is not None:
            self.loan.require(update.version)
        while not self.may_load.is_set():
            await asyncio.sleep(0.001)
        planes = PlanesFile(Path(update.path))
        with planes.reading() as state:
            assert state == (update.version, update.state_hash)
            assert str(planes.state_hash()) == update.state_hash
        planes.close()
        self.updates.append(update)
        self.files.append(sorted(os.listdir(os.path.dirname(update.path))))
        self.loaded.append(update.version)
        self.version = update.version
        return web.json_response({"version": update.version, "state_hash": update.state_hash})

    def stop(self) -> None:
        self.may_load.set()
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
