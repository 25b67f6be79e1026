"""A whole fleet on this machine, of which every part can be killed, stopped and started again.

Owns: a pool with a serving and a rollout engine, a dedicated rollout engine, their subscriber, a relay, two
routers that are peers, and a trainer that publishes. Promises that a part comes back at its old address, as
an operator's supervisor would bring it back. Sends no traffic.
"""

import asyncio
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lib.faults.signals import kill, stopped
from lib.faults.turns import RunningEngine
from lib.faults.weights import other_weights
from rose.measure.rig import PoolSetup, Rig
from rose.node.control import EngineControl
from rose.node.processes import ServerProcess
from rose.ports import free_port
from rose.types import GateMode, Role

RUN = "soak"
PUBLISH_EVERY_S = 5.0
POOL = PoolSetup(num_slabs=96, slab_bytes=768 << 10, headroom_slabs=8)
RELAY_BYTES = 1 << 30
_ENGINES = ("serving", "shared", "dedicated")
_PUBLISHER = Path(__file__).with_name("alternating_publisher.py")


class WholeFleet:
    """The parts by their names."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._pool = f"soak-{os.getpid()}"
        self._starts = 0
        self._processes: dict[str, ServerProcess] = {}
        self._router_ports = [free_port(), free_port()]
        self.weights = (rig.model(Role.ROLLOUT), other_weights(rig))
        """The checkpoints of even and of odd versions."""
        rig.pool(self._pool, **POOL)
        self._relay_url = self._start_relay()
        for name in _ENGINES:
            self._start_engine(name)
        self._controls = {name: rig.wait_engine(name) for name in _ENGINES}
        for number in range(len(self._router_ports)):
            self._start_router(number)
        self._start_subscriber()
        self._start_trainer()

    @property
    def routers(self) -> str:
        """Their addresses, as RouterTurns takes them."""
        return ",".join(f"http://127.0.0.1:{port}" for port in self._router_ports)

    @property
    def serving(self) -> EngineControl:
        return self._controls["serving"]

    def rollout_engine(self, name: str) -> RunningEngine:
        """Returns one of the two rollout engines: shared or dedicated."""
        control = self._controls[name]
        return RunningEngine(control=control, engine_id=control.status().engine_id, pid=self._rig.pid(name))

    def parts(self) -> dict[str, Callable[[], None]]:
        """Returns what starts each part that may be killed again; the call returns once it may be used."""
        return {
            "pool": partial(self._rig.start_daemon, self._pool),
            **{name: partial(self._restart_engine, name) for name in _ENGINES},
            "relay": self._restart_relay,
            "subscriber": self._start_subscriber,
            "router0": partial(self._start_router, 0),
            "router1": partial(self._start_router, 1),
        }

    async def kill(self, part: str, down_s: float) -> None:
        """Kills a part and all its processes, and starts it again after a while."""
        if part == "pool":
            self._rig.kill_daemon(self._pool)
        else:
            kill(self._processes[part].pid)
        await asyncio.sleep(down_s)
        await asyncio.to_thread(self.parts()[part])

    async def stop(self, part: str, down_s: float) -> None:
        """Stops all processes of a part for a while."""
        with stopped(self._processes[part].pid):
            await asyncio.sleep(down_s)

    def end_weights(self) -> None:
        """Ends the trainer and the subscriber, so that the engines' weights stay as they are."""
        for name in ("trainer", "subscriber"):
            self._processes[name].stop()

    def published(self) -> list[int]:
        """Returns the versions that the trainer says it has published."""
        lines = self._rig.log("trainer").read_text().splitlines()
        return [json.loads(line)["version"] for line in lines if line.startswith('{"version"')]

    # Starts -----------------------------------------------------------------------------------------------

    def _start_engine(self, name: str, port: int | None = None) -> None:
        settings: dict[str, Any] = {"pool": self._pool} if name != "dedicated" else {"gate": GateMode.OFF}
        if name != "serving":
            settings |= {"relay": self._relay_url, "run": RUN}
        role = Role.SERVING if name == "serving" else Role.ROLLOUT
        started = self._rig.start_engine(name, role, port=port, **settings)
        self._processes[name] = started

    def _restart_engine(self, name: str) -> None:
        self._start_engine(name, port=urlsplit(self._controls[name].url).port)
        self._controls[name] = self._rig.wait_engine(name)

    def _start_subscriber(self) -> None:
        self._processes["subscriber"] = self._rig.start_subscriber("shared", "dedicated")

    def _start_trainer(self) -> None:
        files = [str(next(folder.glob("*.safetensors"))) for folder in self.weights]
        argv = [str(_PUBLISHER), "--relay", self._relay_url, "--run", RUN, "--every-s", str(PUBLISH_EVERY_S)]
        root = str(_PUBLISHER.parents[2])
        self._processes["trainer"] = self._rig.run([*argv, *files], "trainer", env={"PYTHONPATH": root})

    def _restart_relay(self) -> None:
        self._start_relay(urlsplit(self._relay_url).port)

    def _start_relay(self, port: int | None = None) -> str:
        self._starts += 1
        process, url = self._rig.start_relay(f"relay{self._starts}", capacity_bytes=RELAY_BYTES, port=port)
        self._processes["relay"] = process
        return url

    def _start_router(self, number: int) -> None:
        port, peer = self._router_ports[number], self._router_ports[1 - number]
        workers = [self._controls[name].url for name in ("shared", "dedicated")]
        process, _ = self._rig.run_router(
            [f"{workers[0]},serving", workers[1]],
            *("--peer", f"http://127.0.0.1:{peer}"),
            name=f"router{number}",
            port=port,
        )
        self._processes[f"router{number}"] = process
