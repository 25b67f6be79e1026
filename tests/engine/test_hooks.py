"""The seams to vLLM that can be tested without an engine: plugin, patches, the KV allocation."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

import torch
from references import ModelDirs
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from rose.engine.hooks import patches
from rose.engine.hooks.plugin import register
from rose.engine.memory.kv_range import _AnswerZeros
from rose.engine.settings import EngineSettings
from rose.engine.vllm_version import is_supported
from rose.errors import ConfigError, PoolError
from rose.host_memory import available_bytes
from rose.memory.slabs.backend import BackendKind
from rose.types import Role


@pytest.mark.parametrize(
    ("version", "is_ok"),
    [("0.29.9", False), ("0.30.0", True), ("0.32.0", True), ("0.33.1rc1", True), ("0.34.0", False)],
)
def test_versions_whose_hook_points_were_read_are_supported(version: str, is_ok: bool) -> None:
    assert is_supported(version) is is_ok


def test_a_patch_is_applied_once_and_runs_ahead_of_the_method() -> None:
    class Engine:
        def step(self) -> str:
            return "stepped"

    seen: list[Engine] = []
    for _ in range(2):
        patches._wrap(Engine, "step", before=seen.append)
    engine = Engine()
    assert engine.step() == "stepped"
    assert seen == [engine]


def test_a_patch_without_its_target_says_that_this_vllm_is_not_supported() -> None:
    class Engine:
        pass

    with pytest.raises(ConfigError, match=r"vLLM has no Engine.step, which rose needs; install vllm 0.30 to"):
        patches._wrap(Engine, "step", before=lambda _: None)


def test_registering_twice_is_harmless() -> None:
    """vLLM loads general plugins once per call, several times in a process."""
    from vllm.engine.arg_utils import EngineArgs

    register()
    patched = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is patched


@pytest.mark.parametrize(("given", "is_open"), [({}, True), ({"gpu_memory_utilization": 0.5}, False)])
def test_a_dedicated_engine_on_a_cpu_leaves_memory_for_others(
    models: ModelDirs, given: dict[str, float], is_open: bool
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    if patches._platform()[1] is not BackendKind.HOST:
        pytest.skip("vLLM computes on a GPU here")
    arguments = EngineArgs(str(models.serving), additional_config={}, **given)
    patches._apply(EngineSettings(role=Role.ROLLOUT), arguments)
    found = arguments.kv_cache_memory_bytes
    assert (found is not None) is is_open
    assert found is None or found < available_bytes() / 2


def test_vllms_kv_allocation_is_answered_with_our_memory_and_nothing_else_is() -> None:
    storage = torch.full((4096,), 7, dtype=torch.int8)
    with _AnswerZeros(storage):
        assert torch.zeros(4096, dtype=torch.int32).sum() == 0
        assert torch.zeros(8, dtype=torch.int8).sum() == 0
        got = torch.zeros(4096, dtype=torch.int8)
        assert got.data_ptr() == storage.data_ptr()
        # Only the first: a later buffer of the same size is vLLM's own.
        assert torch.zeros(4096, dtype=torch.int8).sum() == 0


def test_a_vllm_that_allocates_elsewhere_is_refused() -> None:
    message = "did not allocate its KV cache where rose expects it"
    with pytest.raises(PoolError, match=message), _AnswerZeros(torch.zeros(4096, dtype=torch.int8)):
        torch.zeros(512, dtype=torch.int8)


def test_an_error_inside_the_allocation_is_not_replaced() -> None:
    with pytest.raises(MemoryError), _AnswerZeros(torch.zeros(4096, dtype=torch.int8)):
        raise MemoryError


def test_latents_are_written_between_the_layers_of_a_block() -> None:
    """The patch of vLLM's latent attention on a CPU: each slot in its own row, and no other layer's row."""
    patches.write_cpu_latents_between_layers()
    patches.write_cpu_latents_between_layers()  # idempotent
    num_blocks, block_tokens, width, num_layers = 6, 16, 576, 4
    memory = torch.full((num_blocks * num_layers * block_tokens * width,), torch.nan)
    page = block_tokens * width
    layer = memory.as_strided((num_blocks, block_tokens, width), (num_layers * page, width, 1), 2 * page)
    latents, ropes = torch.randn(5, 512), torch.randn(5, 1, 64)
    slots = torch.tensor([0, 17, -1, 95, 40])  # -1 pads
    update = CPUMLAImpl.do_kv_cache_update
    update(object.__new__(CPUMLAImpl), latents, ropes, layer, slots, "auto", torch.ones(1))
    for at, slot in enumerate(slots.tolist()):
        if slot >= 0:
            row = layer[slot // block_tokens, slot % block_tokens]
            assert torch.equal(row, torch.cat([latents[at], ropes[at, 0]]))
    assert int((~memory.isnan()).sum()) == 4 * width
