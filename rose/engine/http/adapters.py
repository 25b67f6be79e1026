"""The LoRA adapters of one engine: versions that are loaded beside each other, and which of them is a run's.

Owns the versions' names, `RUN@VERSION`, which never change what they mean, so that no KV of one is another's.
A turn that names `RUN` as its model gets the newest version from its first step to its last. What is checked
is checked before anything is loaded; an error leaves the old version in use. While the engine is inactive, a
version's files are kept until it is activated. A version that is not the newest any more is unloaded once no
request uses it. Runs on the API server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from rose.engine.adapter_copies import AdapterCopies
from rose.errors import ConfigError, WorkerError
from rose.messages import AdapterUpdate, WeightUpdated, parse_version
from rose.transfer.adapters.folders import lora_name
from rose.transfer.format.manifest import check_name
from rose.types import WeightVersion

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Pause between two looks whether old versions are still in use."""
IDLE_S = 2.0
"""An old version stays for this long without a request: a router may just have sent one that names it."""
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
        return self.has_version(name) or self.has_version(self.newest.get(str(name)))

    def has_version(self, name: object) -> bool:
        """Returns whether turns may name a version. vLLM's own route may have dropped its name."""
        return super().__contains__(name)

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
    """The adapters of an engine with --enable-lora. Calls of load() and load_kept() must not overlap.

    ``models``: vLLM's OpenAIServingModels, whose names routes look up. ``call_ranks`` calls a method of all
    ranks' workers.
    """

    def __init__(
        self,
        client: EngineClient,
        models: Any,
        copies: AdapterCopies,
        call_ranks: Callable[[str, tuple[Any, ...]], Awaitable[list[Any]]],
    ) -> None:
        self._client = client
        self._call_ranks = call_ranks
        self._models = models
        self._copies = copies
        self._names = models.lora_requests = AdapterNames(models.lora_requests.items())
        self.problems: dict[str, str] = {}
        """Why the newest version of a run that was delivered is not loaded."""
        self._loaded: dict[str, _Loaded] = {}
        self._kept: dict[str, _Loaded] = {}
        """The version of each run that is loaded when the engine is activated."""
        self._old: dict[str, _Loaded] = {}
        """Those of them that are not the newest any more."""
        self._nameless: list[_Loaded] = []
        self._placeless: list[_Loaded] = []
        self._unloading: asyncio.Task[None] | None = None

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
        newest = {run: name for run, name in self._names.newest.items() if self._names.has_version(name)}
        held = {run: self._loaded[name] for run, name in newest.items()} | self._kept
        return [each.update.version for each in held.values()]

    async def load(self, update: AdapterUpdate, *, is_active: bool = True) -> WeightUpdated:
        """Loads a version beside those that are loaded; from then on turns that name its run get it. If the
        engine is not active, it is checked and kept until load_kept().

        Raises: ConfigError where the adapter does not fit the engine, NoRoom, or whatever vLLM raises; the
        old version is still in use then.
        """
        version = _checked_version(update.version)
        try:
            await self._load(version, update, is_active=is_active)
        except Exception as error:
            self.problems[version.run_id] = f"{update.version}: {error}"
            raise
        self.problems.pop(version.run_id, None)
        return WeightUpdated(version=update.version, state_hash=update.state_hash)

    async def load_kept(self) -> None:
        """Loads what was kept while the engine was inactive. What fails is told as a problem of its run, and
        the subscriber, which no longer finds the version in the status, delivers it again."""
        while self._kept:
            run_id, kept = self._kept.popitem()
            name, version = kept.request.lora_name, kept.update.version
            try:
                await self._begin(run_id, kept)
                self.problems.pop(run_id, None)
            except Exception as error:  # whatever fails in vLLM: the engine is activated without it
                logger.exception("kept adapter not loaded: name=%s", name)
                self.problems[run_id] = f"{version}: {error}"

    async def _load(self, version: WeightVersion, update: AdapterUpdate, *, is_active: bool) -> None:
        name, run_id = lora_name(version), version.run_id
        kept = self._kept.get(run_id)
        held = kept if kept is not None and kept.request.lora_name == name else self._loaded.get(name)
        if held is not None and held.update.state_hash != update.state_hash:
            raise ConfigError(
                f"{update.version} is loaded with state hash {held.update.state_hash}, this one has "
                f"{update.state_hash}: a version never changes; begin a run of another id"
            )
        if held is None:
            self._check_name(run_id)
            if is_active:
                self._check_room(run_id, update.version)
            held = await self._take(name, update, is_checked=not is_active)
        if is_active:
            await self._begin(run_id, held)
            return
        self._kept[run_id] = held
        if kept is not None and kept is not held and kept.request.lora_name not in self._loaded:
            shutil.rmtree(kept.folder, ignore_errors=True)

    async def _begin(self, run_id: str, held: _Loaded) -> None:
        """Lets new turns of the run have a version, which is loaded if it is not yet."""
        name = held.request.lora_name
        if name not in self._loaded:
            try:
                self._check_room(run_id, held.update.version)
                request = held.request
                await self._call(
                    "load_adapter", held, request.lora_name, request.lora_int_id, str(held.folder)
                )
            except BaseException:
                await self._forget(held)
                raise
            self._loaded[name] = held
        before = self._names.newest.get(run_id)
        self._names[name] = held.request
        self._names.newest[run_id] = name  # from here on, new turns
        self._old.pop(name, None)
        logger.info("adapter in use: version=%s before=%s", held.update.version, before)
        if before is not None and before != name:
            self._retire(before)

    def _check_name(self, run_id: str) -> None:
        is_taken = run_id in self._names and run_id not in self._names.newest
        if self._models.is_base_model(run_id) or is_taken:
            raise ConfigError(
                f"run {run_id} has the name of a model that this engine serves already: turns could not tell "
                "them apart; publish the adapter under another run id"
            )

    def _check_room(self, run_id: str, version: str) -> None:
        num_loaded = len({*self._names, *self._loaded}) + len(self._nameless)
        if num_loaded < self.room:
            return
        config = self._client.vllm_config.lora_config
        assert config is not None
        old = f"; {', '.join(sorted(self._old))} wait for their last turns" if self._old else ""
        spare = 1 if current_platform.is_cpu() else 0
        wanted = max(2 * len({*self._names.newest, run_id}) + spare, config.max_loras + 1)
        raise NoRoom(
            f"no room for {version}: {num_loaded} adapters are loaded ({', '.join(self._names)}), and this "
            f"engine holds {max(self.room, 0)}{old}; each run needs two places while it changes versions, "
            f"and more if its turns outlast a version: use --max-loras {wanted}"
        )

    async def _take(self, name: str, update: AdapterUpdate, *, is_checked: bool) -> _Loaded:
        """Copies a version's files. is_checked: has each rank check that it fits, too, as _begin() does."""
        number = self._models.lora_id_counter.inc(1)
        copy = f"{name}-{number}"  # the files of an earlier one may still be there
        folder = self._copies.folder / copy
        taken = _Loaded(update, LoRARequest(name, number, str(folder)), folder)
        try:
            await asyncio.to_thread(self._copies.take, update, copy)
            if is_checked:
                await self._call("adapter_problem", taken, str(folder))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return taken

    async def _call(self, method: str, held: _Loaded, *args: str | int) -> None:
        """Calls all ranks. Raises: ConfigError where one of them says that the adapter does not fit."""
        problems = await self._call_ranks(method, args)
        if problem := next((each for each in problems if each is not None), None):
            raise ConfigError(f"adapter {held.update.version}: {problem}")

    async def _forget(self, held: _Loaded) -> None:
        """Leaves nothing of a version on any rank, nor of its files."""
        try:
            await self._client.remove_lora(held.request.lora_int_id)
        finally:
            shutil.rmtree(held.folder, ignore_errors=True)

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
