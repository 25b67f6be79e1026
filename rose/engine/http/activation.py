"""Takes a rollout engine off its GPU between rollout phases, and brings it back (ROSE §4.1).

Owns the order: no new turns, requests ended, slabs returned, weights dropped; and back the other way.
Promises that an engine whose deactivation fails is active again, and one whose activation fails stays
inactive and can be activated again. Runs on the API server's event loop; the scheduler obeys a word on the
status page, and the weights go through vLLM's sleep mode (sleep.py).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform

from rose.engine.hooks.vllm_version import has_sleep_backends
from rose.engine.status import Field, StatusPage
from rose.errors import ConfigError, WorkerError
from rose.messages import ActivationChange

INACTIVE = "this rollout engine is inactive; POST /rose/v1/activate brings its weights back"
OBEYED_WITHIN_S = 30.0
"""The scheduler looks before every step, and an idle one within 50 ms: what takes longer is stuck."""
POLL_S = 0.002


class Activation:
    """One engine's. Calls must not overlap."""

    def __init__(self, client: EngineClient, page: StatusPage) -> None:
        self._client = client
        self._page = page
        self.is_active = True
        self.activated_at_s = time.time()
        self.weights_bytes = 0
        """On the device, over all ranks."""
        self._pids: list[int] = []
        """The ranks' processes, where their memory stands for a device's."""

    async def measure(self) -> None:
        """Ask the workers what their weights take."""
        uses: list[tuple[int | None, int]] = await self._client.collective_rpc("device_use")
        self.weights_bytes = sum(num_bytes for _, num_bytes in uses)
        self._pids = [pid for pid, _ in uses if pid is not None]

    async def deactivate(self, *, is_updated: bool) -> ActivationChange:
        """``is_updated``: the weights are no longer the model's own files'.

        Raises:
            ConfigError: these weights could not be brought back; nothing was changed.
        """
        if not self.is_active:
            return ActivationChange(is_active=False, took_s=0.0)
        if reason := _why_not(self._client.vllm_config, is_updated=is_updated):
            raise ConfigError(f"can't be deactivated: {reason}")
        started_s = time.monotonic()
        self.is_active = False
        try:
            self._page.put(Field.WANTED_INACTIVE, 1)
            await self._obeyed(is_inactive=True)
            await self._client.sleep(level=1, mode="abort")
        except BaseException:
            await self._come_back()
            raise
        await self.measure()
        return ActivationChange(is_active=False, took_s=time.monotonic() - started_s)

    async def activate(self) -> ActivationChange:
        """Raises whatever bringing the weights back raises; the engine is inactive then, and can be asked
        again."""
        if self.is_active:
            return ActivationChange(is_active=True, took_s=0.0)
        started_s = time.monotonic()
        await self._come_back()
        self.activated_at_s = time.time()
        await self.measure()
        return ActivationChange(is_active=True, took_s=time.monotonic() - started_s)

    def fixed_bytes(self) -> int:
        """What the ranks hold of the device beside weights and slabs; 0 on a GPU: nothing measures it yet."""
        return max(0, sum(map(_anonymous_bytes, self._pids)) - self.weights_bytes)

    async def _come_back(self) -> None:
        await self._client.wake_up()
        self._page.put(Field.WANTED_INACTIVE, 0)
        await self._obeyed(is_inactive=False)
        self.is_active = True

    async def _obeyed(self, *, is_inactive: bool) -> None:
        deadline_s = time.monotonic() + OBEYED_WITHIN_S
        while self._page.get(Field.IS_INACTIVE) != is_inactive:
            if time.monotonic() > deadline_s:
                raise WorkerError(f"the scheduler did not obey within {OBEYED_WITHIN_S:.0f} s")
            await asyncio.sleep(POLL_S)


def _why_not(config: VllmConfig, *, is_updated: bool) -> str | None:
    """Why the weights could not be made again from the host's copy; None where they can."""
    if not has_sleep_backends():
        return "this vLLM has no sleep-mode backends"
    if not current_platform.is_cpu():
        return (
            f"so far weights come and go on vLLM's CPU platform only, not on {current_platform.device_type}"
        )
    if (method := config.model_config.quantization) is not None:
        return f"weights quantized with {method} may not all be in the checkpoint"
    if not is_updated and not hasattr(get_model_loader(config.load_config), "get_all_weights"):
        return f"weights of load format {config.load_config.load_format} can't be read twice"
    return None


def _anonymous_bytes(pid: int) -> int:
    """Resident anonymous memory of a process; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    sizes = (int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
    return next(sizes, 0)
