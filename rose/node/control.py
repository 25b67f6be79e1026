"""Control calls to one engine: status, gate, activation, profile, plain completions; and where engines are.

The calls are small and synchronous, and carry no measured traffic. An engine that refuses or is gone is a
WorkerError with the URL.
"""

from collections.abc import Sequence
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from rose.config import Settings, worker_api_key
from rose.engine.status import Field, StatusPage, page_path
from rose.errors import WorkerError
from rose.http import http_client, reason_of
from rose.messages import ActivationChange, GateChange, HarmHistory, Profile, WorkerStatus
from rose.types import GateMode

PROFILE_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 120.0
ACTIVATION_TIMEOUT_S = 600.0
"""A large model's files may have to be read from the disk again."""


def completion_body(
    model: str, prompt: list[int] | list[list[int]], max_tokens: int, *, temperature: float = 0.0
) -> dict[str, Any]:
    """Makes a body of ``/v1/completions`` for exactly ``max_tokens`` tokens and their ids, greedy by default.

    ``prompt`` has the token ids of one prompt or of several.
    """
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def urls_on_this_host(settings: Settings) -> list[str]:
    """Returns where the engines of this host answer, those that this user has started and that are up."""
    urls = []
    for path in sorted(settings.runtime_dir.glob(page_path(settings.runtime_dir, "*").name)):
        try:
            page = StatusPage(path, create=False)
        except (OSError, ValueError):  # removed by its engine just now, or still empty
            continue
        if page.url and psutil.pid_exists(page.get(Field.PID)):
            urls.append(page.url)
    return urls


class EngineControl:
    """One engine, named by its URL. ``timeout_s``: how long it may take to answer a small call."""

    def __init__(self, url: str, model: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.url = url
        self.model = model
        self._timeout_s = timeout_s
        settings, key = Settings.from_environment(), worker_api_key()
        self._worker_headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        self._client = http_client(url, key=settings.key, timeout=timeout_s, ca=settings.tls_ca)

    def status(self, timeout_s: float | None = None) -> WorkerStatus:
        return WorkerStatus.model_validate(self._call("GET", "/rose/v1/status", timeout_s=timeout_s))

    def harm(self) -> HarmHistory:
        return HarmHistory.model_validate(self._call("GET", "/rose/v1/harm"))

    def set_gate(self, mode: GateMode, tpot_target_ms: float | None = None) -> None:
        body = GateChange(mode=mode, tpot_target_ms=tpot_target_ms)
        self._call("POST", "/rose/v1/gate", body.model_dump(mode="json"))

    def profile(self, timeout_s: float = PROFILE_TIMEOUT_S) -> Profile:
        return Profile.model_validate(self._call("POST", "/rose/v1/profile", {}, timeout_s))

    def begin_rl_step(self, step: int) -> None:
        self._call("POST", "/rose/v1/rl_step", {"step": step})

    def set_memory_share(self, share: float) -> None:
        """Bounds a rollout engine by a share of its pool's rollout budget, until its next activation."""
        self._call("POST", "/rose/v1/memory_share", {"share": share})

    def activate(self) -> ActivationChange:
        answer = self._call("POST", "/rose/v1/activate", {}, ACTIVATION_TIMEOUT_S)
        return ActivationChange.model_validate(answer)

    def deactivate(self) -> ActivationChange:
        answer = self._call("POST", "/rose/v1/deactivate", {}, ACTIVATION_TIMEOUT_S)
        return ActivationChange.model_validate(answer)

    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[list[int], str]]:
        """Returns greedy continuations: (token ids, finish reason) of each prompt, in order."""
        body = completion_body(self.model, [list(prompt) for prompt in prompts], max_tokens)
        answer = self._call("POST", "/v1/completions", body, PROFILE_TIMEOUT_S)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [(choice["token_ids"], choice["finish_reason"]) for choice in choices]

    def max_model_len(self) -> int:
        """Returns the context of the model that the engine serves, in tokens."""
        return int(self._call("GET", "/v1/models")["data"][0]["max_model_len"])

    def prompt_counts(self) -> tuple[float, float]:
        """Returns how many requests the engine has finished since its start, and the tokens of their prompts.

        They are vLLM's metrics. Raises: WorkerError if it shows none, as with --disable-log-stats.
        """
        name = "vllm:request_prompt_tokens"
        text = self._send("GET", "/metrics", None, self._timeout_s).text
        families = [each for each in text_string_to_metric_families(text) if each.name == name]
        if not families:
            raise WorkerError(f"{self.url}/metrics: no {name}; start the engine without --disable-log-stats")
        num_requests, num_tokens = (
            sum(sample.value for sample in families[0].samples if sample.name == f"{name}_{end}")
            for end in ("count", "sum")
        )
        return num_requests, num_tokens

    def close(self) -> None:
        self._client.close()

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        timeout_s = timeout_s if timeout_s is not None else self._timeout_s
        return self._send(method, path, body, timeout_s).json()

    def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> httpx.Response:
        try:
            headers = {} if path.startswith("/rose/") else self._worker_headers
            answer = self._client.request(method, path, json=body, timeout=timeout_s, headers=headers)
        except httpx.HTTPError as error:
            raise WorkerError(
                f"{self.url}{path}: no answer ({reason_of(error)}); is an engine running there?"
            ) from error
        if answer.is_error:
            raise WorkerError(f"{self.url}{path}: {answer.status_code} {answer.text[:300]}")
        return answer
