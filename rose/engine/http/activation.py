"""Takes a rollout engine off its GPU between rollout phases, and brings it back (ROSE §4.1).

Owns the order: new turns are refused, requests end, slabs go back, weights are dropped; activation goes the
other way. Promises that an engine whose deactivation fails is active again, and that one whose activation
fails stays inactive and can be activated again. Runs on the API server's event loop. The scheduler obeys a
word on the status page, and the weights go through vLLM's sleep mode (rose/engine/weights/sleep.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform

from rose.engine.http.cores import EngineCores
from rose.engine.status import Field
from rose.engine.vllm_version import has_sleep_backends
from rose.errors import ConfigError, WorkerError
from rose.messages import ActivationChange

INACTIVE = "this rollout engine is inactive; POST /rose/v1/activate brings its weights back"
OBEYED_WITHIN_S = 30.0
"""Longest wait for the scheduler, which looks before every step and at least every 50 ms."""
POLL_S = 0.002
RESTORED = ("compressed-tensors",)
"""Quantizations whose weights are as vLLM's loader makes them of what a checkpoint or a run has."""


class Activation:
    """The activation of one engine. Calls must not overlap."""

    def __init__(
        self, client: EngineClient, cores: EngineCores, before_turns: Callable[[], Awaitable[None]]
    ) -> None:
        """before_turns: awaited when the weights are back and no turn has come."""
        self._client = client
        self._before_turns = before_turns
        self._cores = cores
        self.is_active = True
        self.activated_at_s = time.time()
        self.weights_bytes = 0
        """What the weights of all ranks take on the device."""
        self._pids: list[int] = []
        """The ranks' processes, if their memory stands for a device's."""

    async def measure(self) -> None:
        """Asks the ranks what their weights take."""
        uses: list[tuple[int | None, int]] = await self._cores.call_ranks("device_use")
        self.weights_bytes = sum(num_bytes for _, num_bytes in uses)
        self._pids = [pid for pid, _ in uses if pid is not None]

    async def deactivate(self, *, is_updated: bool) -> ActivationChange:
        """Ends all requests, then frees slabs and weights. ``is_updated`` says that an update has replaced
        the weights in the model's own files.

        Raises:
            ConfigError: the weights could not be restored later, so nothing was changed.
        """
        if not self.is_active:
            return ActivationChange(is_active=False, took_s=0.0)
        if reason := _why_not(self._client.vllm_config, is_updated=is_updated):
            raise ConfigError(f"can't be deactivated: {reason}")
        started_s = time.monotonic()
        self.is_active = False
        try:
            self._cores.put(Field.WANTED_INACTIVE, 1)
            await self._obeyed(is_inactive=True)
            await self._client.sleep(level=1, mode="abort")
        except BaseException:
            await self._come_back()
            raise
        await self.measure()
        return ActivationChange(is_active=False, took_s=time.monotonic() - started_s)

    async def activate(self) -> ActivationChange:
        """Restores the weights and takes turns again. Raises whatever the restoring raises; the engine then
        is inactive and can be activated again. Ends the bound of a share of memory."""
        self._cores.set_memory_share(1.0)
        if self.is_active:
            return ActivationChange(is_active=True, took_s=0.0)
        started_s = time.monotonic()
        await self._come_back()
        self.activated_at_s = time.time()
        await self.measure()
        return ActivationChange(is_active=True, took_s=time.monotonic() - started_s)

    def fixed_bytes(self) -> int:
        """Returns what the ranks hold on the device beside weights and slabs. It is 0 on a GPU, where it is
        not measured."""
        return max(0, sum(map(_anonymous_bytes, self._pids)) - self.weights_bytes)

    async def _come_back(self) -> None:
        await self._client.wake_up()
        await self._before_turns()
        self._cores.put(Field.WANTED_INACTIVE, 0)
        await self._obeyed(is_inactive=False)
        self.is_active = True

    async def _obeyed(self, *, is_inactive: bool) -> None:
        deadline_s = time.monotonic() + OBEYED_WITHIN_S
        while self._cores.get(Field.IS_INACTIVE) != [int(is_inactive)] * len(self._cores):
            if time.monotonic() > deadline_s:
                raise WorkerError(f"the scheduler did not obey within {OBEYED_WITHIN_S:.0f} s")
            await asyncio.sleep(POLL_S)


def _why_not(config: VllmConfig, *, is_updated: bool) -> str | None:
    """Returns why the weights could not be restored from the host's copy, or None if they can be."""
    if not has_sleep_backends():
        return "this vLLM has no sleep-mode backends"
    if not current_platform.is_cpu() and not config.model_config.enable_sleep_mode:
        return "vLLM has no allocator for its sleep mode on this platform"
    method = config.model_config.quantization
    if method not in (None, *RESTORED):
        return f"weights quantized with {method} may not all be in the checkpoint"
    if not is_updated and not hasattr(get_model_loader(config.load_config), "get_all_weights"):
        return f"weights of load format {config.load_config.load_format} can't be read twice"
    return None


def _anonymous_bytes(pid: int) -> int:
    """Returns the resident anonymous memory of a process, 0 if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    sizes = (int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
    return next(sizes, 0)
