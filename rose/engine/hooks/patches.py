"""Patches for the places where vLLM has no public extension point for what ROSE needs.

Owns every patch. Each is one idempotent function that says why and for which versions, and raises if its
target is gone. All other code uses vLLM's worker, scheduler, weight-transfer and endpoint classes.
"""

import functools
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rose.arguments import BAD_INPUT_STATUS
from rose.engine.amx import portable_attention
from rose.engine.hooks.compatibility import (
    check_api_servers,
    check_config,
    check_data_parallelism,
    check_parallelism,
    resolve_deployment,
)
from rose.engine.hooks.parent import end_with_parent
from rose.engine.settings import CONFIG_KEY, EngineSettings
from rose.engine.vllm_version import (
    VERSIONS_KEY,
    has_sleep_backends,
    is_supported,
    lacks,
    supported_range,
    versions,
    vllm_version,
)
from rose.errors import BoardError, ConfigError, PoolError
from rose.host_memory import available_bytes
from rose.memory.pool.pool_memory import PoolSize
from rose.memory.slabs.backend import BackendKind
from rose.types import Role

_MARK = "_rose_patched"
_HOST_KV_PART = 4
"""A dedicated engine on a CPU takes this part of the free memory for its KV, as a pool does: vLLM would want
92% of the host's memory, and would not start beside anything that uses 8%."""
_STREAM_PARAMETERS = ["request", "engine_inputs", "result_generator"]


def configure_from_additional_config() -> None:
    """Lets ``--additional-config '{"rose": ...}'`` select ROSE's worker, scheduler and weight backend.

    Why: a general plugin can't change engine arguments, and four more flags that must agree with each other
    would invite mistakes. In vLLM 0.30-0.33 every entry point calls ``EngineArgs.create_engine_config``.
    """
    from vllm.engine.arg_utils import EngineArgs

    def before(engine_args: Any) -> None:
        with ends_commands():
            settings = EngineSettings.parse(engine_args.additional_config or {})
            if settings is not None:
                _apply(settings.named(os.getpid()), engine_args)

    def after(engine_args: Any, config: Any) -> None:
        with ends_commands():
            settings = EngineSettings.parse(engine_args.additional_config or {})
            if settings is not None:
                check_config(config, settings)
                scheduling = config.scheduler_config
                scheduling.scheduler_cls = _scheduler(settings.role, is_async=scheduling.async_scheduling)

    _wrap(EngineArgs, "create_engine_config", before=before, after=after)


def give_scheduler_its_core() -> None:
    """Hands the ``EngineCoreProc`` to a ROSE scheduler, and has it end with its API server (parent.py).

    Why: an idle engine core blocks on its input queue, so it would never notice that serving wants memory
    back or that a lease ran out. The scheduler's watcher thread puts a WAKEUP there. And the scheduler alone
    knows how many steps may be in flight, which is the core's ``batch_queue_size``. The patch is on the loop
    and not on ``__init__``, because plugins load inside ``__init__``. vLLM 0.30-0.33.
    """
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    def before(core: Any) -> None:
        bind = getattr(core.scheduler, "bind_core", None)
        if bind is not None:
            end_with_parent()
            bind(core)

    _wrap(EngineCoreProc, "run_busy_loop", before=before)
    _wrap(DPEngineCoreProc, "run_busy_loop", before=before)


def tell_scheduler_of_waves() -> None:
    """Has a serving scheduler claim the GPU for its rank's dummy batches, and tells it the end of a wave.

    Why: the data-parallel ranks of a mixture of experts compute every step together. A rank without requests
    computes dummy batches, which no scheduler plans, until all ranks are done. vLLM 0.30-0.33.
    """
    from vllm.v1.engine.core import DPEngineCoreProc

    def before_dummy_batch(core: Any) -> None:
        if (begin := getattr(core.scheduler, "begin_dummy_step", None)) is not None:
            begin()

    def after_agreement(core: Any, is_running: bool) -> None:
        if not is_running and (end := getattr(core.scheduler, "end_wave", None)) is not None:
            end()

    _wrap(DPEngineCoreProc, "execute_dummy_batch", before=before_dummy_batch)
    _wrap(DPEngineCoreProc, "_has_global_unfinished_reqs", before=lambda _core: None, after=after_agreement)


def write_cpu_latents_between_layers() -> None:
    """Lets vLLM's latent attention on a CPU write to a KV cache whose blocks have other layers between them.

    Why: its kernels read such a cache, but it writes through a view of all rows of a layer, which wants them
    side by side. It gets a view that spans the other layers' rows, and the slots in it. vLLM 0.30-0.33.
    """
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    original = getattr(CPUMLAImpl, "do_kv_cache_update", None)
    if original is None:
        raise lacks("CPUMLAImpl.do_kv_cache_update")
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def update(self: Any, latents: Any, ropes: Any, cache: Any, slots: Any, *args: Any) -> None:
        num_blocks, (block_tokens, width) = cache.shape[0], cache.shape[-2:]
        rows_apart, remainder = divmod(cache.stride(0), width)
        assert remainder == 0, (cache.shape, cache.stride())
        rows = cache.as_strided(((num_blocks - 1) * rows_apart + block_tokens, width), (width, 1))
        spread = slots // block_tokens * rows_apart + slots % block_tokens
        original(self, latents, ropes, rows, spread.where(slots >= 0, slots), *args)

    setattr(update, _MARK, True)
    CPUMLAImpl.do_kv_cache_update = update


def continue_from_generated_tokens() -> None:
    """Lets a rank count the tokens at the end of a new request's prompt that were generated before as output.

    Why: Model Runner V1 makes each new request without output, and penalties and bad words go by the output.
    rose/engine/scheduling/continuation.py has the scheduler's side. vLLM 0.30-0.33.
    """
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    from rose.engine.scheduling.continuation import num_generated

    def before(state: Any) -> None:
        tokens = state.prompt_token_ids
        if count := num_generated(state.sampling_params, tokens):
            state.prompt_token_ids, state.output_token_ids = tokens[:-count], tokens[-count:]

    _wrap(CachedRequestState, "__post_init__", before=before)


def stream_routed_experts() -> None:
    """Adds which experts processed a turn's tokens to the last event of a streamed completion.

    Why: with --enable-return-routed-experts, vLLM streams the experts on /inference/v1/generate alone, and
    routers stream completions. vLLM 0.32-0.33.
    """
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    original = getattr(OpenAIServingCompletion, "completion_stream_generator", None)
    if original is None or [*inspect.signature(original).parameters][1:4] != _STREAM_PARAMETERS:
        parameters = ", ".join(_STREAM_PARAMETERS)
        raise lacks(f"OpenAIServingCompletion.completion_stream_generator({parameters}, ...)")
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    async def stream(
        self: Any, request: Any, inputs: Any, results: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        experts: dict[int, Any] = {}

        async def noted() -> AsyncIterator[Any]:
            async for prompt, result in results:
                for output in result.outputs:
                    if output.routed_experts is not None:
                        experts[output.index + prompt * (request.n or 1)] = output.routed_experts
                yield prompt, result

        async for event in original(self, request, inputs, noted(), *args, **kwargs):
            yield with_routed_experts(event, experts) if experts else event

    setattr(stream, _MARK, True)
    OpenAIServingCompletion.completion_stream_generator = stream


def with_routed_experts(event: str, experts: dict[int, Any]) -> str:
    """Returns the event of a stream with the routed experts of the choices that it ends, which are taken out
    of `experts`."""
    from vllm.utils.serial_utils import numpy2base64

    if '"finish_reason":"' not in event:
        return event
    fields = json.loads(event.removeprefix("data: "))
    for choice in fields["choices"]:
        if choice.get("finish_reason") is not None and choice["index"] in experts:
            choice["routed_experts"] = numpy2base64(experts.pop(choice["index"]))
    return f"data: {json.dumps(fields)}\n\n"


def report_chosen_cores(client: Any, report: Callable[[int, float], None]) -> None:
    """Calls ``report`` with the data-parallel rank that vLLM has chosen for a request, and the request's
    time of arrival.

    Why: a front end announces a request to all ranks, because vLLM chooses the rank only after tokenization.
    The announcement must not hold rollouts back at the ranks that do not get the request. vLLM 0.30-0.33.
    """
    choose = getattr(client, "get_core_engine_for_request", None)
    if choose is None or not hasattr(client, "_call_utility_async"):
        client_class = type(client).__name__
        raise lacks(f"{client_class}.get_core_engine_for_request or {client_class}._call_utility_async")
    if getattr(choose, _MARK, False):
        return

    @functools.wraps(choose)
    def chosen(request: Any) -> Any:
        core = choose(request)
        report(client.core_engines.index(core), request.arrival_time)
        return core

    setattr(chosen, _MARK, True)
    client.get_core_engine_for_request = chosen


@contextmanager
def ends_commands() -> Iterator[None]:
    """Ends vLLM's own commands with one line and exit status 2 on bad input, like ROSE's commands. Code that
    makes an engine in Python gets the exception."""
    try:
        yield
    except (ConfigError, PoolError, BoardError) as error:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        command = spec.name if spec is not None else Path(sys.argv[0]).name
        if command.split(".")[0] != "vllm":
            raise
        print(f"rose: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(BAD_INPUT_STATUS) from error


def _ignore(_self: Any, _result: Any) -> None:
    pass


def _wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[[Any], None],
    after: Callable[[Any, Any], None] = _ignore,
) -> None:
    """Makes a method run ``before(self)`` first and ``after(self, result)`` last. Idempotent.

    Raises: ConfigError if the method is gone.
    """
    original = getattr(owner, name, None)
    if original is None:
        raise lacks(f"{owner.__name__}.{name}")
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self)
        result = original(self, *args, **kwargs)
        after(self, result)
        return result

    setattr(wrapper, _MARK, True)
    setattr(owner, name, wrapper)


def _apply(settings: EngineSettings, engine_args: Any) -> None:
    if not is_supported(vllm_version()):
        raise ConfigError(f"vllm {vllm_version()} is not supported by rose; install {supported_range()}")

    from vllm.config import WeightTransferConfig
    from vllm.v1.executor import UniProcExecutor

    from rose.engine.hooks.executor import RanksExecutor

    num_ranks = check_parallelism(engine_args, has_pool=settings.pool is not None)
    check_data_parallelism(engine_args)
    check_api_servers(settings, engine_args)
    settings = resolve_deployment(settings, engine_args.kv_transfer_config)
    engine_args.additional_config = {
        **engine_args.additional_config,
        CONFIG_KEY: settings.model_dump(mode="json"),
        VERSIONS_KEY: versions(),
    }
    engine_args.worker_cls, backend = _platform()
    engine_args.scheduler_cls = _scheduler(settings.role, is_async=False)  # vLLM has not chosen yet
    # The CPU platform turns "uni" into "mp", whose message queues spin for a second after every step on the
    # CPUs that compute. It leaves a class alone, and one rank needs no queues.
    engine_args.distributed_executor_backend = UniProcExecutor if num_ranks == 1 else RanksExecutor
    if settings.role is Role.ROLLOUT and backend is BackendKind.CUDA:
        engine_args.enable_sleep_mode = _can_free_weights()
    if settings.is_updated:
        engine_args.weight_transfer_config = WeightTransferConfig(backend="rose")
    if settings.pool is not None:
        sizes = [
            _pool_for(str(settings.of_rank(rank).pool), num_ranks, backend)
            for rank in range(engine_args.data_parallel_size)
        ]
        size = min(sizes, key=lambda each: each.num_slabs * each.slab_bytes)
        settings.check_floor(size.num_slabs)
        if backend is BackendKind.HOST and engine_args.attention_backend is None:
            engine_args.attention_backend = portable_attention(engine_args.model)
        engine_args.kv_cache_memory_bytes = size.num_slabs * size.slab_bytes
        if settings.role is Role.ROLLOUT:
            # The gate fits steps of this size into serving's slack. A dedicated engine has no such limit.
            given = engine_args.max_num_batched_tokens
            engine_args.max_num_batched_tokens = min(given or settings.chunk_tokens, settings.chunk_tokens)
    elif backend is BackendKind.HOST and _is_kv_size_open(engine_args):
        num_all = num_ranks * engine_args.data_parallel_size
        engine_args.kv_cache_memory_bytes = available_bytes() // (_HOST_KV_PART * num_all)


def _is_kv_size_open(engine_args: Any) -> bool:
    share = engine_args.gpu_memory_utilization
    return engine_args.kv_cache_memory_bytes is None and share == type(engine_args).gpu_memory_utilization


def _scheduler(role: Role, *, is_async: bool) -> str:
    """Returns the qualified name of the scheduler class for engines with this role."""
    name = f"{'Async' if is_async else ''}{role.title()}Scheduler"
    return f"rose.engine.scheduling.{role}_scheduler.{name}"


def _can_free_weights() -> bool:
    """Whether vLLM has its allocator whose memory on a GPU can be freed, which deactivation needs."""
    from vllm.device_allocator.cumem import cumem_available

    return has_sleep_backends() and cumem_available


def _platform() -> tuple[str, BackendKind]:
    """Returns this platform's worker class and the kind of slabs that it needs. Raises: ConfigError."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "rose.engine.hooks.worker.RoseCPUWorker", BackendKind.HOST
    if current_platform.is_cuda():
        return "rose.engine.hooks.gpu_worker.RoseGPUWorker", BackendKind.CUDA
    raise ConfigError(
        f"vLLM runs on {current_platform.device_type}, and rose engines run on its CPU and CUDA platforms; "
        f"install vLLM for one of these"
    )


def _pool_for(pool: str, num_ranks: int, backend: BackendKind) -> PoolSize:
    """Returns the size of the pool that an engine names.

    Raises: ConfigError for a pool that doesn't fit the engine, BoardError for a pool of another ROSE version.
    """
    from rose.admission.board import check_page
    from rose.memory.pool.pool import PoolClient, describe_pool

    size = describe_pool(pool)
    with PoolClient.observe(pool) as observer:
        check_page(observer.board_words)
    size.check_ranks(pool, num_ranks)
    if size.backend is not backend:
        raise ConfigError(
            f"pool {pool} has {size.backend} slabs, and this engine computes on {backend} memory; "
            f"start the pool with --backend {backend}"
        )
    return size
