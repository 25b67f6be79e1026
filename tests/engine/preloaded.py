"""The process with vLLM loaded, from which the tests fork theirs: an import of vLLM takes 20 s of CPU."""

from multiprocessing import get_context

ASYNC = {"ROSE_TEST_ASYNC": "1"}
"""Environment of engines with async scheduling (async_on_cpu.py)."""
LATE = {**ASYNC, "ROSE_TEST_LATE": "1"}
"""The same for engines with a server, on a late device (late_device.py)."""
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core"),
        *("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.launchers.api_server.app_state"),
        *("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner", "vllm.v1.core.sched.scheduler"),
        *("vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.models.qwen3"),
        *("vllm.v1.core.sched.async_scheduler", "async_on_cpu", "inspecting", "settled"),
    ]
)
