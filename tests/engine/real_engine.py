"""A real vLLM engine on the CPU, started as `rose serve` starts it, and the calls that tests make to it."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from forked_server import ForkedServer
from tiny_models import MAX_MODEL_LEN

from rose.messages import ActivationChange, Profile, RunToFollow, WeightUpdate, WorkerStatus
from rose.node.control import completion_body
from rose.node.launch import engine_process
from rose.node.node_config import EngineConfig
from rose.ports import free_port
from rose.types import GateMode, Role

READY_S = 1200.0
"""Seconds on an idle machine; several engines may start at once on a busy one."""
CALL_S = 600.0
MAX_SEQS = 12
OWN_BLOCKS = 256
"""KV blocks of an engine without a pool. It fills them with zeros when it starts: by default, a whole GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One greedy completion."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_reason: str | None
    num_cached_tokens: int


class RealEngine:
    """One engine with its process, log and HTTP client."""

    def __init__(
        self,
        model: Path,
        role: Role,
        folder: Path,
        *vllm_args: str,
        variables: Any = None,
        **rose: Any,
    ) -> None:
        """Starts it; ``folder`` gets its log, runtime and cache. ``rose``: its settings beside the role.
        ``variables``: more of its environment, a mapping."""
        self.role = role
        config = EngineConfig(
            model=str(model),
            port=free_port(),
            role=role,
            vllm_args=(
                *("--served-model-name", "tiny", "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN)),
                *("--max-num-seqs", str(MAX_SEQS), "--enable-prompt-tokens-details"),
                "--disable-uvicorn-access-log",
                *(("--num-gpu-blocks-override", str(OWN_BLOCKS)) if "pool" not in rose else ()),
                *vllm_args,
            ),
            **rose,
        )
        environment = {
            "ROSE_RUNTIME_DIR": str(runtime_dir(folder)),
            "ROSE_CACHE_DIR": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **(variables if variables is not None else {}),
        }
        self.url = config.url
        # No connection is used twice: a thread may take a connection for expired that httpcore has just
        # given to another thread's request, and close it (seen: a read from a closed descriptor).
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=config.url, timeout=CALL_S, limits=limits, trust_env=False)
        self._threads = ThreadPoolExecutor(64)
        server = engine_process(config, folder / f"{config.name}.log", environment)
        self.process = ForkedServer(server).start()

    def wait_ready(self) -> "RealEngine":
        self.process.wait_ready(f"{self.url}/health", READY_S)
        return self

    def stop(self) -> None:
        self.process.stop()
        self._threads.shutdown()
        self._http.close()

    # Requests ---------------------------------------------------------------------------------------

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        xargs: Mapping[str, float | str] | None = None,
        headers: Mapping[str, str] | None = None,
        model: str = "tiny",
    ) -> Answer:
        """One greedy completion. Raises httpx.HTTPStatusError unless the answer is 200."""
        body = {**completion_body(model, list(prompt), max_tokens), "logprobs": 1}
        if xargs is not None:
            body["vllm_xargs"] = xargs
        response = self._http.post("/v1/completions", json=body, headers=headers)
        response.raise_for_status()
        answer = response.json()
        choice = answer["choices"][0]
        details = answer["usage"].get("prompt_tokens_details")
        return Answer(
            tokens=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"] if choice["logprobs"] is not None else [],
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
            num_cached_tokens=details["cached_tokens"] if details is not None else 0,
        )

    def stream(self, prompt: Sequence[int], max_tokens: int, **headers: str) -> list[dict[str, Any]]:
        """One greedy completion as it is streamed: all events but [DONE]."""
        body = {**completion_body("tiny", list(prompt), max_tokens), "stream": True}
        with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def start_requests(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, model: str = "tiny", **options: Any
    ) -> list[Future[Answer]]:
        """All at once, each in a thread."""
        return [
            self._threads.submit(self.complete, prompt, max_tokens, model=model, **options)
            for prompt in prompts
        ]

    # ROSE's routes ------------------------------------------------------------------------------------

    def status(self) -> WorkerStatus:
        return WorkerStatus.model_validate(self._http.get("/rose/v1/status").raise_for_status().json())

    def models(self) -> list[dict[str, Any]]:
        """vLLM's list of what it serves."""
        cards: list[dict[str, Any]] = self._http.get("/v1/models").raise_for_status().json()["data"]
        return cards

    def metrics(self) -> dict[str, float]:
        """ROSE's samples on vLLM's /metrics, by name and labels."""
        text = self._http.get("/metrics").raise_for_status().text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("rose_")]
        return {name: float(value) for name, value in lines}

    def set_gate(self, mode: GateMode) -> None:
        self.post("gate", {"mode": mode}).raise_for_status()
        until(lambda: self.status().gate.mode is mode, f"gate {mode}")

    def begin_rl_step(self, step: int) -> None:
        self.post("rl_step", {"step": step}).raise_for_status()

    def profile(self) -> Profile:
        return Profile.model_validate(self.post("profile", {}).raise_for_status().json())

    def update_weights(self, update: WeightUpdate) -> httpx.Response:
        return self.post("weights", update.model_dump())

    def loaned_run(self) -> str | None:
        """The run of the job that the GPU is lent to. Asks as a subscriber does, which the engine then
        counts on."""
        answer = self._http.get("/rose/v1/loan").raise_for_status().json()
        return RunToFollow.model_validate(answer).run

    def activate(self) -> ActivationChange:
        return ActivationChange.model_validate(self.post("activate", {}).raise_for_status().json())

    def deactivate(self) -> ActivationChange:
        return ActivationChange.model_validate(self.post("deactivate", {}).raise_for_status().json())

    def begin_anew(self) -> None:
        """Active, idle and without a cache, wherever a test has left it: a pause ends all requests."""
        self.deactivate()
        self.activate()

    def post(self, route: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(f"/rose/v1/{route}", json=body)


def until(condition: Callable[[], object], what: str, at_most_s: float = 600.0) -> None:
    """Waits for a condition instead of for a time."""
    deadline = time.monotonic() + at_most_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {at_most_s:.0f} s: {what}"
        time.sleep(0.02)


def new_folder(folder: Path, name: str) -> Path:
    """Makes another folder at each call, so that a test or a fixture that failed can run again. ``name`` is
    its first part, and short, as a socket's path may have 107 bytes."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))


def runtime_dir(folder: Path) -> Path:
    """Where the sockets of the pools of ``folder``'s engines are."""
    path = folder / "run"
    path.mkdir(mode=0o700, exist_ok=True)
    return path
