"""Which versions of adapters an engine holds and unloads, on a stand-in for vLLM's client of its core."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_adapters import adapter_config, adapter_tensors, adapter_update, save_adapter
from vllm.lora.request import LoRARequest
from vllm.utils.counter import AtomicCounter

from rose.engine.adapter_copies import AdapterCopies
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

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[str | None]:
        """Two ranks: the first one loads what the second one may refuse."""
        assert Path(args[-1]).is_dir()
        if method == "load_adapter":
            self.num_added += 1
            self.held.add(args[1])
            if self.failure is not None:
                raise self.failure
        else:
            assert method == "adapter_problem"
        return [None, self.problem]

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
        copies = AdapterCopies(folder / "root", "own")
        self._own = copies.folder
        self.adapters = EngineAdapters(client, self.models, copies, client.collective_rpc)

    def update(self, version: str) -> AdapterUpdate:
        path = self.folder / "staged" / version
        saved = save_adapter(path, adapter_tensors(len(version)), adapter_config("tiny"))
        return adapter_update(saved, version)

    async def load(self, version: str, *, is_active: bool = True) -> AdapterUpdate:
        update = self.update(version)
        await self.adapters.load(update, is_active=is_active)
        return update

    @property
    def files(self) -> set[str]:
        return {path.name.rpartition("-")[0] for path in self._own.glob("*")}


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
    (problem,) = engine.adapters.problems.values()
    assert problem.startswith("math/2: no room for math/2")
    engine.core.end("turn")
    await settled(lambda: len(engine.core.held) == 1)
    await engine.adapters.load(update)
    assert (engine.adapters.versions(), engine.adapters.problems) == (["math/2"], {})


async def test_an_inactive_engine_keeps_the_newest_version_of_each_run_until_it_is_activated(
    make: Any,
) -> None:
    engine = make(6)
    await engine.load("math/0")
    for version in ("math/1", "math/2", "code/7"):
        await engine.load(version, is_active=False)
    assert (engine.core.num_added, engine.files) == (1, {"math@0", "math@2", "code@7"})
    assert sorted(engine.adapters.versions()) == ["code/7", "math/2"]
    assert engine.models.lora_requests["math"].lora_name == "math@0"
    engine.core.problem = "it has rank 9"
    with pytest.raises(ConfigError, match="adapter math/33: it has rank 9"):
        await engine.load("math/33", is_active=False)
    engine.core.problem = None
    await engine.adapters.load_kept()
    assert (engine.core.num_added, sorted(engine.adapters.versions())) == (3, ["code/7", "math/2"])
    names = engine.models.lora_requests
    assert [names[run].lora_name for run in ("math", "code")] == ["math@2", "code@7"]
    await settled(lambda: engine.files == {"math@2", "code@7"})


async def test_a_kept_version_that_has_no_place_is_told_and_can_be_delivered_again(make: Any) -> None:
    engine = make(2)
    await engine.load("math/0")
    update = await engine.load("code/7", is_active=False)
    await engine.adapters.load_kept()
    assert (engine.adapters.versions(), engine.files) == (["math/0"], {"math@0"})
    assert "code/7: no room for code/7" in engine.adapters.problems["code"]
    with pytest.raises(NoRoom):
        await engine.adapters.load(update)


async def test_a_version_whose_place_is_taken_while_it_is_copied_leaves_no_files(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(2)
    take = AdapterCopies.take

    def late(copies: AdapterCopies, update: AdapterUpdate, name: str) -> Path:
        engine.models.lora_requests["own"] = LoRARequest("own", 77, "/own")  # by vLLM's own route
        return take(copies, update, name)

    monkeypatch.setattr(AdapterCopies, "take", late)
    with pytest.raises(NoRoom):
        await engine.load("math/0")
    assert (engine.files, engine.adapters.versions()) == (set(), [])


async def test_a_version_that_vllms_own_route_unloads_is_told_as_gone_and_comes_back(make: Any) -> None:
    engine = make(4)
    update = await engine.load("math/0")
    names = engine.models.lora_requests
    del names["math@0"]
    assert engine.adapters.versions() == [] and "math" not in names
    await engine.adapters.load(update)
    assert engine.adapters.versions() == ["math/0"] and names["math"].lora_name == "math@0"
    assert engine.core.num_added == 1


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
    with pytest.raises(ConfigError, match=r"an adapter is a folder as PEFT saves it, and .*--ipc=host"):
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
