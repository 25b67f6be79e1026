"""Real engines without a server, in processes forked off one that has vLLM loaded: seconds to start.

The engine core lives in the process of its driver, which steps it and sees its scheduler and block pool.
"""

import os
import queue
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from preloaded import FORKS, start_fork
from real_engine import MAX_SEQS, runtime_dir
from tiny_models import MAX_MODEL_LEN, SLAB_BYTES

from rose.engine.amx import ask_for_amx, portable_attention
from rose.engine.hooks.parent import end_with_parent
from rose.engine.stock import CHUNK_TOKENS, STOCK_ENV
from rose.memory.daemon.daemon import start_daemon

RESULT_S = 1200.0
POLL_S = 0.0002
KV_BYTES = 128 << 20
"""An engine without a pool fills its KV memory with zeros when it starts. No test needs more than this."""
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM would take this variable's GiB instead."""


class Fork:
    """``function(**arguments)``, which must be importable by name, in a process of its own."""

    def __init__(self, folder: Path, function: Callable[..., Any], **arguments: Any) -> None:
        """``folder`` gets the log; it holds the runtime directory of its pools."""
        self._log = folder / f"{function.__name__}-{time.monotonic_ns()}.log"
        self._source, sink = FORKS.Pipe(duplex=False)
        self._process = start_fork(_run, sink, folder, self._log, function, arguments, daemon=True)
        sink.close()

    def result(self) -> Any:
        """What the function returned. Raises AssertionError with its traceback or its log."""
        assert self._source.poll(RESULT_S), f"no result in {RESULT_S:.0f} s: {self._log_tail()}"
        try:
            is_ok, value = self._source.recv()
        except EOFError:
            raise AssertionError(f"the process died: {self._log_tail()}") from None
        assert is_ok, f"{value}\n{self._log_tail()}"
        return value

    @property
    def has_ended(self) -> bool:
        """Whether ``result()`` would not wait."""
        return self._source.poll()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text().splitlines()[-40:]) if self._log.exists() else "no log"


@contextmanager
def forks(folder: Path, **given: Any) -> Iterator[Callable[..., Fork]]:
    """Yields what forks a function in the folder, which is made if need be, with ``given`` and further
    arguments. It stops all forks at the end."""
    folder.mkdir(exist_ok=True)
    with ExitStack() as undo:

        def start(function: Callable[..., Any], **arguments: Any) -> Fork:
            fork = Fork(folder, function, **given, **arguments)
            undo.callback(fork.stop)
            return fork

        yield start


@contextmanager
def forks_in_pool(
    folder: Path,
    pool: str,
    *,
    num_slabs: int,
    headroom_slabs: int,
    slab_bytes: int = SLAB_BYTES,
    num_shards: int = 1,
) -> Iterator[Callable[..., Fork]]:
    """``forks`` beside a pool, which ends after them. ``slab_bytes``: of all shards together."""
    folder.mkdir(exist_ok=True)
    daemon = start_daemon(
        pool,
        num_slabs=num_slabs,
        slab_bytes=slab_bytes // num_shards,
        num_shards=num_shards,
        headroom_slabs=headroom_slabs,
        runtime_dir=runtime_dir(folder),
    )
    with daemon, forks(folder) as start:
        yield start


def _run(
    sink: Connection, folder: Path, log: Path, function: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    end_with_parent()
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(STOCK_ENV)
    del os.environ[KV_SPACE]
    os.environ.update(ROSE_RUNTIME_DIR=str(runtime_dir(folder)), ROSE_CACHE_DIR=str(folder / "cache"))
    os.environ["VLLM_RPC_BASE_PATH"] = str(runtime_dir(folder))  # for its sockets
    ask_for_amx()
    try:
        sink.send((True, function(**arguments)))
    except BaseException:
        sink.send((False, traceback.format_exc()))


def _fork_ranks() -> None:
    """Has ranks forked off this process, which has computed nothing yet. vLLM would spawn them, and each
    would import all of vLLM.

    Each rank has one thread that computes, and nothing that waits for a message keeps a CPU busy: ranks that
    compute a sum do while they wait for each other, and more busy threads than CPUs make each sum take
    milliseconds.
    """
    import torch
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.executor import multiproc_executor

    shm_broadcast.sched_yield = partial(time.sleep, POLL_S)
    torch.set_num_threads(1)
    multiproc_executor.get_mp_context = lambda: get_context("fork")
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def make_engine(model: Path, rose: dict[str, Any] | None, **args: Any) -> Any:
    """A vLLM ``LLM``, stock or under ROSE with these settings; prompts longer than 512 tokens in chunks.
    Several ranks are forked processes."""
    if args.keys() & {"tensor_parallel_size", "pipeline_parallel_size"}:
        _fork_ranks()
    if rose is not None:
        os.environ["VLLM_PLUGINS"] = "rose"
        args["additional_config"] = {"rose": {"gate": "off", "poison_slabs": True, **rose}}
    import inspecting  # noqa: F401
    from vllm import LLM
    from vllm.v1.executor import UniProcExecutor

    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "kv_cache_memory_bytes": KV_BYTES,
        "enable_prefix_caching": rose is not None,
        "attention_backend": portable_attention(str(model)),
        "distributed_executor_backend": UniProcExecutor,
    }
    return LLM(str(model), **{**defaults, **args})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One greedy completion, as far as it came."""

    tokens: list[int]
    finish_reason: str | None
    stop_reason: str | None
    num_cached_tokens: int
    kv_transfer: dict[str, Any] | None
    """What a prefiller tells the decoder."""


class Driver:
    """Asks and steps an engine, as its API server and its busy loop would."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self.core = self._engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self._num_asked = 0
        self.replies: dict[str, Reply] = {}
        self.core.input_queue = queue.Queue()  # an engine core in its caller's thread has none
        if bind := getattr(self.scheduler, "bind_core", None):
            bind(self.core)  # starts the thread that notices leases and cuts in an idle engine

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stops: Sequence[int] = (), **more: Any
    ) -> list[str]:
        """Adds requests, each with its stop token if there are any; returns their names. ``more``: further
        sampling parameters."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        names = [str(self._num_asked + index) for index in range(len(prompts))]
        self._num_asked += len(prompts)
        for index, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            params = SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                stop_token_ids=[stops[index]] if stops else None,
                **more,
            )
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=list(prompt)), params)
        return names

    def step(self) -> None:
        while not self.core.input_queue.empty():  # wake-ups: as long as one is there, no grant is offered
            self.core.input_queue.get_nowait()
        for output in self._engine.step():
            completion = output.outputs[0]
            self.replies[output.request_id] = Reply(
                tokens=list(completion.token_ids),
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                num_cached_tokens=output.num_cached_tokens or 0,
                kv_transfer=getattr(output, "kv_transfer_params", None),
            )

    def step_until(self, condition: Callable[[], object], what: str, at_most_s: float = 600.0) -> None:
        deadline = time.monotonic() + at_most_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {at_most_s:.0f} s: {what}"
            self.step()
            if not self.scheduler.has_requests():
                time.sleep(0.005)

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Reply]:
        names = self.ask(prompts, max_tokens)
        return self.wait(names)

    def wait(self, names: Sequence[str]) -> list[Reply]:
        def is_done() -> bool:
            return all(name in self.replies and self.replies[name].finish_reason for name in names)

        self.step_until(is_done, f"answers {names}")
        return [self.replies[name] for name in names]
