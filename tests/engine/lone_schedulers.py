"""ROSE's schedulers as an engine core makes them: with vLLM's configuration and a pool, without a worker."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rank_models import without_weights
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rose.engine.hooks.patches import _scheduler
from rose.engine.hooks.plugin import register
from rose.engine.memory.kv_range import pinned_slab
from rose.engine.settings import EngineSettings
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from rose.memory.pool.wire import Kind
from rose.types import Role

POOL = "lone"
ENGINE_ID = "e"
STEP_TOKENS = 512
BLOCK_TOKENS = 16
NUM_BLOCKS = 64


@contextmanager
def lone_scheduler(
    folder: Path,
    role: Role,
    *,
    is_async: bool = False,
    max_model_len: int = 64,
    watermark: float = 0.0,
    rank: int = 0,
    context_size: int = 1,
    kv_transfer_config: Any = None,
    **settings: Any,
) -> Iterator[Any]:
    """The scheduler of an engine in the environment's runtime directory. ``settings``: of the rose key.
    ``rank``: the data-parallel one. ``context_size``: of decode context parallelism.

    With async scheduling it is another class; the caller decides how many steps it has in flight.
    """
    register()
    init_none_hash(sha256)
    config = without_weights(
        folder / "model",
        max_model_len=max_model_len,
        max_num_seqs=2,
        max_num_batched_tokens=STEP_TOKENS,
        watermark=watermark,
        kv_transfer_config=kv_transfer_config,
        additional_config={"rose": {"role": str(role), "engine_id": ENGINE_ID, **settings}},
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    config.parallel_config.data_parallel_index = rank
    config.parallel_config.decode_context_parallel_size = context_size
    its = EngineSettings(role=role, engine_id=ENGINE_ID, **settings).of_rank(rank)
    with ExitStack() as undo:
        if its.pool is not None:
            worker = PoolClient.attach(its.pool, role=role, engine_id=its.engine_id, kind=Kind.WORKER)
            pinned_slab(undo.enter_context(worker), acquire=True)
        if is_async:  # vLLM turns it off on a CPU
            config.scheduler_config.scheduler_cls = _scheduler(role, is_async=True)
        scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=_kv_cache_config(),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS * context_size,
        )
        undo.callback(scheduler.shutdown)
        yield scheduler


@contextmanager
def pooled_scheduler(folder: Path, role: Role, **arguments: Any) -> Iterator[Any]:
    """The scheduler of the only engine in a pool, whose board it shares with the caller. ``arguments``: of
    lone_scheduler."""
    with (
        start_daemon(POOL, num_slabs=8, slab_bytes=1 << 20, headroom_slabs=1),
        lone_scheduler(folder, role, pool=POOL, **arguments) as scheduler,
    ):
        yield scheduler


def request_of(name: str, prompt: list[int], max_tokens: int, *, block_tokens: int = BLOCK_TOKENS) -> Request:
    """A request as an engine core hands it to a lone scheduler, with the hashes of its prompt's blocks."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    hasher = get_request_block_hasher(block_tokens, sha256)
    return Request(name, prompt, params, None, block_hasher=hasher)


def _kv_cache_config() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
    layers = ["layer.0", "layer.1"]
    stride = len(layers) * spec.page_size_bytes
    tensor = KVCacheTensor(
        size=NUM_BLOCKS * stride, layers=layers, layer_stride=spec.page_size_bytes, block_stride=stride
    )
    groups = [KVCacheGroupSpec(layers, spec)]
    return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=groups)
