"""Which versions of adapters an engine holds and unloads, on a stand-in for vLLM's client of its core."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_adapters import adapter_config, adapter_tensors, adapter_update, save_adapter
from vllm.lora.request import LoRARequest
from vllm.utils.counter import AtomicCounter

from rose.engine.http import adapters
from rose.engine.http.adapters import EngineAdapters, NoRoom
from rose.errors import ConfigError, FrameError
from rose.messages import AdapterUpdate


class Core:
    """vLLM's client of an engine core: what it holds, and the requests that run."""

    def __init__(self, max_loras: int) -> None:
        lora = SimpleNamespace(max_loras=max_loras, max_cpu_loras=None)
        self.vllm_config = SimpleNamespace(lora_config=lora)
        self.output_processor = SimpleNamespace(request_states={})
        self.held: set[int] = set()
        self.num_added = 0
        self.problem: str | None = None
        self.failure: Exception | None = None

    async def collective_rpc(self, method: str, args: tuple[str, ...]) -> list[str | None]:
        assert method == "adapter_problem" and Path(args[0]).is_dir()
        return [None, self.problem]

    async def add_lora(self, request: LoRARequest) -> bool:
        self.num_added += 1
        self.held.add(request.lora_int_id)
        if self.failure is not None:
            raise self.failure
        return True

    async def remove_lora(self, number: int) -> bool:
        self.held.discard(number)
        return True

    def run(self, name: str, request: LoRARequest) -> None:
        self.output_processor.request_states[name] = SimpleNamespace(lora_request=request)

    def end(self, name: str) -> None:
        del self.output_processor.request_states[name]


class Engine:
    """An engine's adapters, and vLLM's names of them."""

    def __init__(self, folder: Path, max_loras: int) -> None:
        self.folder, self.core = folder, Core(max_loras)
        self.models = SimpleNamespace(
            lora_requests={}, lora_id_counter=AtomicCounter(0), is_base_model=lambda name: name == "tiny"
        )
        client: Any = self.core
        self.adapters = EngineAdapters(client, self.models, folder / "own")

    def update(self, version: str) -> AdapterUpdate:
        path = self.folder / "staged" / version
        saved = save_adapter(path, adapter_tensors(len(version)), adapter_config("tiny"))
        return adapter_update(saved, version)

    async def load(self, version: str) -> AdapterUpdate:
        update = self.update(version)
        await self.adapters.load(update)
        return update

    @property
    def files(self) -> set[str]:
        return {path.name.rpartition("-")[0] for path in (self.folder / "own").glob("*")}


async def settled(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """make(max_loras): an engine that unloads what is old at once."""
    for name in ("LOOK_S", "IDLE_S", "FILES_S"):
        monkeypatch.setattr(adapters, name, 0.02)
    return lambda max_loras: Engine(tmp_path, max_loras)


async def test_a_version_is_unloaded_when_its_last_request_has_ended_and_then_its_files_go(make: Any) -> None:
    engine = make(4)
    await engine.load("math/0")
    old = engine.models.lora_requests["math"]
    engine.core.run("turn", old)
    await engine.load("math/1")
    names = engine.models.lora_requests
    assert (old.lora_name, names["math"].lora_name) == ("math@0", "math@1")
    assert set(names) == {"math@0", "math@1"} and "math" in names and "code" not in names
    await asyncio.sleep(0.2)
    assert names["math@0"] is old and old.lora_int_id in engine.core.held
    engine.core.end("turn")
    await settled(lambda: engine.files == {"math@1"})
    assert set(names) == {"math@1"} and engine.core.held == {names["math"].lora_int_id}
    assert engine.adapters.versions() == ["math/1"]


async def test_a_version_waits_for_a_place_and_on_a_cpu_one_place_stays_empty(make: Any) -> None:
    engine = make(3)
    assert engine.adapters.room == 2
    await engine.load("math/0")
    engine.core.run("turn", engine.models.lora_requests["math"])
    await engine.load("math/1")
    update = engine.update("math/2")
    with pytest.raises(
        NoRoom, match=r"no room for math/2: 2 adapters .* holds 2; math@0 wait.*--max-loras 4"
    ):
        await engine.adapters.load(update)
    assert engine.adapters.versions() == ["math/1"]
    engine.core.end("turn")
    await settled(lambda: len(engine.core.held) == 1)
    await engine.adapters.load(update)
    assert engine.adapters.versions() == ["math/2"]


async def test_what_fails_leaves_the_old_version_and_nothing_of_the_new_one(make: Any) -> None:
    engine = make(6)
    await engine.load("math/0")
    before = dict(engine.models.lora_requests), set(engine.core.held), engine.files
    engine.core.problem = "it has rank 9"
    with pytest.raises(ConfigError, match="adapter math/1: it has rank 9"):
        await engine.load("math/1")
    engine.core.problem, engine.core.failure = None, RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        await engine.load("math/11")
    wrong = engine.update("math/111").model_copy(update={"state_hash": "0" * 32})
    with pytest.raises(FrameError, match="adapter not loaded"):
        await engine.adapters.load(wrong)
    with pytest.raises(ConfigError, match="an adapter is a folder as PEFT saves it"):
        await engine.adapters.load(wrong.model_copy(update={"path": str(engine.folder)}))
    assert (dict(engine.models.lora_requests), engine.core.held, engine.files) == before
    assert engine.adapters.versions() == ["math/0"]


async def test_names_never_change_their_meaning(make: Any) -> None:
    engine = make(6)
    update = await engine.load("math/0")
    await engine.adapters.load(update)
    assert engine.core.num_added == 1
    with pytest.raises(ConfigError, match="a version never changes; begin a run of another id"):
        await engine.adapters.load(update.model_copy(update={"state_hash": "0" * 32}))
    with pytest.raises(ConfigError, match="run tiny has the name of a model that this engine serves already"):
        await engine.load("tiny/0")
    engine.models.lora_requests["code"] = engine.models.lora_requests["math"]
    with pytest.raises(ConfigError, match="run code has the name of a model"):
        await engine.load("code/0")


@pytest.mark.parametrize("version", ["/etc/x/1", "../../x/1", "a/b/1", "math", "math/-1", "math/01", "./1"])
async def test_a_version_that_is_no_run_and_number_touches_no_folder(make: Any, version: str) -> None:
    engine = make(6)
    update = engine.update("math/0").model_copy(update={"version": version})
    before = set(engine.folder.rglob("*"))
    with pytest.raises(ConfigError, match="adapter '"):
        await engine.adapters.load(update)
    assert set(engine.folder.rglob("*")) == before and engine.core.num_added == 0
