"""What a pool's daemon chooses where its operator says nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pool_setup import PATIENCE_S, POOL, StartEngine

from rose.errors import ConfigError
from rose.memory.pool.pool import describe_pool
from rose.memory.pool.pool_memory import PoolSize
from rose.memory.pool.sizing import OpenSize, choose_slab_bytes, kv_block_bytes
from rose.memory.slabs import backend
from rose.memory.slabs.backend import BackendKind

HOST, MIB, GIB = BackendKind.HOST, 1 << 20, 1 << 30
QWEN3_8B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
QWEN2_5_1_5B = {
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "hidden_size": 1536,
    "dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "dtype": "bfloat16",
}
QWEN3_NEXT_80B = {
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_key_head_dim": 128,
    "dtype": "bfloat16",
}
FALCON_H1_7B = {
    "num_hidden_layers": 44,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_n_heads": 24,
    "mamba_d_head": 128,
    "mamba_d_state": 256,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "num_shards", "kind", "expected"),
    [
        (QWEN3_8B, 1, BackendKind.CUDA, 2.25 * MIB),
        (QWEN3_8B, 1, BackendKind.HOST, 18 * MIB),  # 128 tokens a block on a CPU
        (QWEN3_8B, 4, BackendKind.CUDA, 2.25 * MIB / 4),
        (QWEN3_8B, 16, BackendKind.CUDA, 2.25 * MIB / 8),  # a rank has one head at least
        ({"text_config": QWEN3_8B}, 1, BackendKind.CUDA, 2.25 * MIB),
        ({**QWEN3_8B, "torch_dtype": "float32"}, 1, BackendKind.CUDA, 4.5 * MIB),
        (QWEN2_5_1_5B, 1, BackendKind.CUDA, 28 * 2 * 2 * 128 * 2 * 16),
        (DEEPSEEK_V3, 8, BackendKind.CUDA, 61 * 576 * 2 * 128),  # every rank keeps the whole latent
        (QWEN3_NEXT_80B, 1, BackendKind.CUDA, 12 * 2 * MIB),  # a state of 2 MiB; four groups of 12 layers
        (QWEN3_NEXT_80B, 2, BackendKind.CUDA, 12 * MIB),
        (FALCON_H1_7B, 1, BackendKind.CUDA, 44 * 3 * MIB),  # each layer has a state and attention
    ],
)
def test_a_models_block_is_estimated_from_its_config(
    config: dict[str, Any], num_shards: int, kind: BackendKind, expected: float
) -> None:
    assert kv_block_bytes(config, num_shards=num_shards, backend=kind) == expected


def blocks(*configs: dict[str, Any]) -> list[int]:
    return [kv_block_bytes(config, num_shards=1, backend=BackendKind.CUDA) for config in configs]


def test_slabs_for_one_model_hold_whole_blocks() -> None:
    assert choose_slab_bytes(blocks(QWEN3_8B), BackendKind.CUDA) == 18 * MIB


@pytest.mark.parametrize(
    "configs", [(QWEN3_8B, QWEN2_5_1_5B), (DEEPSEEK_V3,), (DEEPSEEK_V3, QWEN3_8B), (QWEN2_5_1_5B,)]
)
def test_slabs_for_several_models_waste_little_of_any(configs: tuple[dict[str, Any], ...]) -> None:
    size = choose_slab_bytes(blocks(*configs), BackendKind.CUDA)
    assert size % (2 * MIB) == 0 and size >= 16 * MIB
    for block in blocks(*configs):
        assert size // block >= 4
        assert size // block * block / size > 0.9


def test_without_a_model_slabs_have_the_backends_default() -> None:
    assert choose_slab_bytes([], BackendKind.HOST) == 2 * MIB
    assert choose_slab_bytes([], BackendKind.CUDA) == 64 * MIB


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Qwen3-8B's config.json, and a file of weights of 1 GiB that takes no space."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(GIB)
    return str(folder)


def test_the_models_leave_the_pool_what_they_do_not_need(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "available_bytes", lambda: 20 * GIB)
    size = OpenSize(backend=HOST).completed([model, model])
    # A quarter of what two engines with 1 GiB of weights and 1 GiB of their own leave: 4 GiB.
    assert size == PoolSize(num_slabs=56, slab_bytes=72 * MIB, headroom_slabs=11)
    ranks = OpenSize(num_shards=2, backend=HOST).completed([model])
    # Each of two ranks has 10 GiB, and takes 0.5 GiB of weights and 1 GiB of its own.
    assert (ranks.slab_bytes, ranks.num_slabs) == (36 * MIB, 60)


def test_layers_of_unknown_kinds_count_one_by_one() -> None:
    kinds = ["linear_attention", "attention of a new kind"]
    config = {**QWEN3_NEXT_80B, "num_hidden_layers": 2, "layer_types": kinds}
    assert kv_block_bytes(config, num_shards=1, backend=BackendKind.CUDA) == 2 * 2 * MIB


def test_what_is_given_stays(model: str) -> None:
    given = OpenSize(num_slabs=7, slab_bytes=MIB, headroom_slabs=0, backend=HOST)
    assert given.completed([model]) == PoolSize(num_slabs=7, slab_bytes=MIB, headroom_slabs=0)
    assert OpenSize(num_slabs=7, backend=HOST).completed([]) == PoolSize(
        num_slabs=7, slab_bytes=2 * MIB, headroom_slabs=1
    )
    assert given.matches(given.completed([])) and not given.matches(
        OpenSize(num_slabs=8, backend=HOST).completed([])
    )


def test_what_cannot_be_chosen_is_refused_with_the_fix(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "available_bytes", lambda: 3 * GIB)
    with pytest.raises(ConfigError, match=r"3\.2 GB free, the engines need 2\.1 GB.* or set --num-slabs"):
        OpenSize(backend=HOST).completed([model])
    with pytest.raises(
        ConfigError, match=r"--num-slabs is missing, .*\(no --model is given\): set --num-slabs"
    ):
        OpenSize(backend=HOST).completed([])
    with pytest.raises(ConfigError, match=r"are unknown \(nobody/has-this\)"):
        OpenSize(backend=HOST).completed([model, "nobody/has-this"])
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"are unknown \({model}\)"):
        OpenSize(backend=HOST).completed([model])
    assert OpenSize(num_slabs=4, backend=HOST).completed([model]).slab_bytes == 2 * MIB


def test_a_restarted_daemon_keeps_what_its_predecessor_chose(
    model: str, runtime_dir: Path, start_engine: StartEngine
) -> None:
    def daemon() -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "rose.memory.daemon.daemon", POOL, "--num-slabs", "4"]
        argv += ["--backend", "host"]
        return subprocess.Popen([*argv, "--model", model, "--runtime-dir", str(runtime_dir)])

    (Path(model) / "config.json").write_text(json.dumps({**QWEN3_8B, "num_hidden_layers": 1}))
    chosen = PoolSize(num_slabs=4, slab_bytes=2 * MIB, headroom_slabs=1)
    with daemon() as first:
        assert describe_pool(POOL, runtime_dir=runtime_dir, timeout_s=PATIENCE_S) == chosen
        start_engine("rollout", "one", "scheduler")
        first.kill()
    (Path(model) / "config.json").write_text(json.dumps(QWEN3_8B))
    with daemon() as second:
        assert describe_pool(POOL, runtime_dir=runtime_dir, timeout_s=PATIENCE_S) == chosen
        second.terminate()
