"""The LoRA adapters of one engine: versions that are loaded beside each other, and which of them is a run's.

Owns the versions' names, `RUN@VERSION`, which never change what they mean, so that no KV of one is another's,
and the engine's copy of each version's files. A turn that names `RUN` as its model gets the newest version
from its first step to its last. What is checked is checked before anything is loaded; an error leaves the old
version in use. A version that is not the newest any more is unloaded once no request uses it. Runs on the API
server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from rose.errors import ConfigError, FrameError, WorkerError
from rose.messages import AdapterUpdate, WeightUpdated, parse_version
from rose.transfer.adapters.description import CONFIG_FILE, TENSORS_FILE
from rose.transfer.adapters.folders import lora_name
from rose.transfer.format.checkpoint import checkpoint_state_hash
from rose.transfer.format.manifest import check_name
from rose.types import WeightVersion

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Pause between two looks whether old versions are still in use."""
IDLE_S = 2.0
"""An old version stays for so long without a request: a router may just have sent one that names it."""
FILES_S = 60.0
"""Its files stay for so long after that: longer than a prompt is tokenized."""


class NoRoom(WorkerError):
    """All places for adapters are taken; one comes free when the turns of an old version have ended."""


class AdapterNames(dict[str, LoRARequest]):
    """vLLM's adapters by name. A run's id stands for its newest version, and is not listed."""

    def __init__(self, loaded: Iterable[tuple[str, LoRARequest]] = ()) -> None:
        super().__init__(loaded)
        self.newest: dict[str, str] = {}

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.newest

    def __missing__(self, name: str) -> LoRARequest:
        return self[self.newest[name]]


@dataclass(slots=True)
class _Loaded:
    """A version that the engine holds."""

    update: AdapterUpdate
    request: LoRARequest
    folder: Path
    used_at_s: float = 0.0
    """When it was last seen in use, since it is not the newest any more."""


class EngineAdapters:
    """The adapters of an engine with --enable-lora. Calls of load() must not overlap.

    ``models``: vLLM's OpenAIServingModels, whose names routes look up. ``folder``: the engine's own.
    """

    def __init__(self, client: EngineClient, models: Any, folder: Path) -> None:
        self._client = client
        self._models = models
        self._folder = folder
        self._names = models.lora_requests = AdapterNames(models.lora_requests.items())
        self._loaded: dict[str, _Loaded] = {}
        self._old: dict[str, _Loaded] = {}
        """Those of them that are not the newest any more."""
        self._nameless: list[_Loaded] = []
        self._placeless: list[_Loaded] = []
        self._unloading: asyncio.Task[None] | None = None
        shutil.rmtree(folder, ignore_errors=True)  # of an engine of this name that was killed

    @property
    def room(self) -> int:
        """How many adapters may be loaded at once.

        On a CPU vLLM computes turns of the base model with what lies in the last place (index -1), which
        therefore stays empty. vLLM 0.30-0.33.
        """
        config = self._client.vllm_config.lora_config
        assert config is not None
        if current_platform.is_cpu():
            return int(config.max_loras) - 1
        most = config.max_cpu_loras
        return int(most if most is not None else config.max_loras)

    def versions(self) -> list[str]:
        """Returns the newest version of each run, such as "run/7"."""
        return [self._loaded[name].update.version for name in self._names.newest.values()]

    async def load(self, update: AdapterUpdate) -> WeightUpdated:
        """Loads a version beside those that are loaded; from then on turns that name its run get it.

        Raises: ConfigError where the adapter does not fit the engine, NoRoom, or whatever vLLM raises; the
        old version is still in use then.
        """
        version = _checked_version(update.version)
        name, run_id = lora_name(version), version.run_id
        loaded = self._loaded.get(name)
        if loaded is not None and loaded.update.state_hash != update.state_hash:
            raise ConfigError(
                f"{update.version} is loaded with state hash {loaded.update.state_hash}, this one has "
                f"{update.state_hash}: a version never changes; begin a run of another id"
            )
        if loaded is None:
            self._check_name(run_id)
            self._check_room(run_id, update.version)
            loaded = await self._load_beside(name, update)
        before = self._names.newest.get(run_id)
        self._names.newest[run_id] = name  # from here on, new turns
        self._old.pop(name, None)
        logger.info("adapter in use: version=%s before=%s", update.version, before)
        if before is not None and before != name:
            self._retire(before)
        return WeightUpdated(version=update.version, state_hash=update.state_hash)

    def _check_name(self, run_id: str) -> None:
        is_taken = run_id in self._names and run_id not in self._names.newest
        if self._models.is_base_model(run_id) or is_taken:
            raise ConfigError(
                f"run {run_id} has the name of a model that this engine serves already: turns could not tell "
                "them apart; publish the adapter under another run id"
            )

    def _check_room(self, run_id: str, version: str) -> None:
        num_loaded = len(self._names) + len(self._nameless)
        if num_loaded < self.room:
            return
        config = self._client.vllm_config.lora_config
        assert config is not None
        old = f"; {', '.join(sorted(self._old))} wait for their last turns" if self._old else ""
        spare = 1 if current_platform.is_cpu() else 0
        wanted = max(2 * len({*self._names.newest, run_id}) + spare, config.max_loras + 1)
        raise NoRoom(
            f"no room for {version}: {num_loaded} adapters are loaded ({', '.join(self._names)}), and the "
            f"engine holds {max(self.room, 0)}{old}; each run needs two places while it changes versions, "
            f"and more if its turns outlast a version: use --max-loras {wanted}"
        )

    async def _load_beside(self, name: str, update: AdapterUpdate) -> _Loaded:
        number = self._models.lora_id_counter.inc(1)
        folder = self._folder / f"{name}-{number}"  # the files of an earlier one may still be there
        request = LoRARequest(name, number, str(folder))
        try:
            await asyncio.to_thread(_take_files, Path(update.path), folder, update.state_hash)
            problems = await self._client.collective_rpc("adapter_problem", args=(str(folder),))
            if problem := next((each for each in problems if each is not None), None):
                raise ConfigError(f"adapter {update.version}: {problem}")
            await self._client.add_lora(request)
        except BaseException:
            await self._forget(request, folder)
            raise
        loaded = _Loaded(update, request, folder)
        self._loaded[name], self._names[name] = loaded, request
        return loaded

    async def _forget(self, request: LoRARequest, folder: Path) -> None:
        """Leaves nothing of a version on any rank, nor of its files."""
        try:
            await self._client.remove_lora(request.lora_int_id)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _retire(self, name: str) -> None:
        self._old[name] = self._loaded[name]
        self._old[name].used_at_s = time.monotonic()
        if self._unloading is None or self._unloading.done():
            self._unloading = asyncio.create_task(self._unload_unused(), name="rose-unload-adapters")

    async def _unload_unused(self) -> None:
        """Unloads old versions, each once no request has used it for a while.

        First its name goes, then its place, then its files: a request that had looked up the name may still
        be in the tokenizer, and an engine core that misses an adapter in a step loads it from its files, or
        dies.
        """
        while self._old or self._nameless or self._placeless:
            await asyncio.sleep(LOOK_S)
            used, now = self._used(), time.monotonic()
            for each in (*self._old.values(), *self._nameless, *self._placeless):
                if each.request.lora_int_id in used:
                    each.used_at_s = now
            for name in [name for name, each in self._old.items() if now >= each.used_at_s + IDLE_S]:
                self._nameless.append(self._old.pop(name))
                self._nameless[-1].used_at_s = now
                del self._loaded[name]
                self._names.pop(name, None)  # vLLM's own route may have unloaded it
            for each in [each for each in self._nameless if now >= each.used_at_s + IDLE_S]:
                await self._take_place(each)
                self._nameless.remove(each)
                self._placeless.append(each)
            for each in [each for each in self._placeless if now >= each.used_at_s + FILES_S]:
                await self._take_place(each)
                shutil.rmtree(each.folder, ignore_errors=True)
                self._placeless.remove(each)

    def _used(self) -> set[int]:
        """Returns the ids of the adapters that requests use, waiting ones included."""
        states = self._client.output_processor.request_states.values()
        return {state.lora_request.lora_int_id for state in states if state.lora_request is not None}

    async def _take_place(self, loaded: _Loaded) -> None:
        try:
            await self._client.remove_lora(loaded.request.lora_int_id)
            logger.info("adapter unloaded: name=%s", loaded.request.lora_name)
        except Exception:  # the engine core may be gone, which vLLM reports itself
            logger.exception("adapter not unloaded: name=%s", loaded.request.lora_name)


def _checked_version(text: str) -> WeightVersion:
    """Returns the version, whose run id becomes part of a folder's name. Raises: ConfigError."""
    try:
        version = parse_version(text)
        assert version is not None
        check_name(version.run_id, "run id")
    except (WorkerError, ValueError) as error:
        raise ConfigError(f"adapter {text!r}: {error}") from error
    if str(version) != text:
        raise ConfigError(f"adapter {text!r}: write its version as {version}")
    return version


def _take_files(source: Path, folder: Path, state_hash: str) -> None:
    """Makes the engine's own copy of an adapter's files, and checks it. Raises: ConfigError, FrameError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    for name in (CONFIG_FILE, TENSORS_FILE):
        if not (source / name).is_file():
            raise ConfigError(f"{source} has no {name}: an adapter is a folder as PEFT saves it")
        try:
            os.link(source / name, folder / name)
        except OSError:  # on another file system
            shutil.copyfile(source / name, folder / name)
    found = str(checkpoint_state_hash(folder / TENSORS_FILE))
    if found != state_hash:
        raise FrameError(f"{source}: state hash {found}, expected {state_hash}; adapter not loaded")
