"""TRL on a ROSE router: its own client for the turns, the relay for the weights.

TRL lets its users plug in these pieces: a ``rollout_func`` and a callback for GRPOTrainer, and a
``weight_transfer`` for AsyncGRPOTrainer (whose rollout worker needs only the router's URL). TRL's classes
stay unmodified. An optimizer step's weights are in the relay before the next rollout. No weight-update group
is opened: TRL's own goes over NCCL from each worker to the trainer, through routes that a router must not
expose, and ends with the first dead worker.
"""

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import torch
from trl.data_utils import is_conversational
from trl.generation.vllm_client import VLLMClient

from rose.config import Settings
from rose.errors import WorkerError
from rose.http import http_client
from rose.trainers.publishing import PublishWeights
from rose.trainers.router import Announce, routers_of
from rose.transfer.publish.publisher import SyncReport, WeightPublisher
from rose.types import WeightVersion

__all__ = ["PublishWeights", "RelayWeights", "RouterRollouts"]

CONNECT_TIMEOUT_S = 60.0
_CONNECT_EACH_S = 3.0
_ASKED_AGAIN = (500, 502)
"""The same router is asked again after these; TRL's client would after 503 as well."""
_HEALTH_TIMEOUT_S = 10.0
_PAUSE_S = 1.0
_UNAVAILABLE = "Request failed: 503"
"""How the message of TRL's plain Exception begins for a router that shuts down or has no worker."""


class RouterRollouts:
    """``GRPOTrainer(rollout_func=RouterRollouts(url), ...)``: TRL's own VLLMClient, pointed at the router.

    ``router_url`` may be several addresses of routers before the same workers, separated by commas: a batch
    whose router dies is asked for again at the next one. By default it is what the job scheduler has set
    (``ROSE_ROUTER_URL``). The key is that of ``ROSE_ROUTER_API_KEY``, and the sampling settings are the
    trainer's.
    ``announce``: called at the start of each RL step. The router is asked for nothing before the first
    rollout: by then the first weights are published.
    """

    def __init__(self, router_url: str | None = None, announce: Announce | None = None) -> None:
        self._urls = routers_of(router_url, Settings.from_environment())
        self._at = 0
        self._client: VLLMClient | None = None
        self._announce = announce
        self._announced = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Answers as TRL expects. ``prompts`` has each prompt as often as it is to be answered."""
        step = trainer.state.global_step + 1
        if self._announce is not None and step != self._announced:
            self._announce(step)
            self._announced = step
        answer = self._answer(prompts, trainer.args)
        # Of each position the sampled token alone: the client was asked for no others.
        logprobs = [[position[0] for position in sequence] for sequence in answer["logprobs"]]
        return {**{key: answer[key] for key in ("prompt_ids", "completion_ids")}, "logprobs": logprobs}

    def _answer(self, prompts: list[Any], args: Any) -> Any:
        """Asks one router after the other. Raises: WorkerError if none has answered in time since the first
        failure."""
        until, num_failed = math.inf, 0
        while True:
            url = self._urls[self._at]
            try:
                client = self._connected(url)
                ask = client.chat if is_conversational({"prompt": prompts[0]}) else client.generate
                return ask(prompts, **_sampling(args))
            except Exception as error:
                if not isinstance(error, OSError) and not str(error).startswith(_UNAVAILABLE):
                    raise  # OSErrors are those of requests, too
                until, num_failed = min(until, time.monotonic() + CONNECT_TIMEOUT_S), num_failed + 1
                if num_failed >= len(self._urls) and time.monotonic() >= until:
                    raise WorkerError(f"{url}: does not answer ({error})") from error
                self._client, self._at = None, (self._at + 1) % len(self._urls)
                if num_failed % len(self._urls) == 0:
                    time.sleep(_PAUSE_S)

    def _connected(self, url: str) -> VLLMClient:
        """Waits until the router has a worker, but not for long if it can't be reached, and not if it drains.
        Raises: ConnectionError."""
        if self._client is None:
            self._client = _RouterClient(base_url=url, connection_timeout=_CONNECT_EACH_S)
        return self._client


class _RouterClient(VLLMClient):
    """TRL's client for one router of several. TRL's own would wait without end for a router that drains, and
    a minute for one that has died."""

    def __init__(self, base_url: str, connection_timeout: float) -> None:
        """Raises: ConnectionError."""
        self._settings = Settings.from_environment()
        super().__init__(base_url=base_url, connection_timeout=connection_timeout)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = _PAUSE_S) -> None:
        """Returns once the router has a worker. Raises: ConnectionError if the router drains, or can't be
        reached for ``total_timeout`` seconds."""
        self._prepare_session()  # TRL asks for the models next, which may need the key
        until, ca = time.monotonic() + total_timeout, self._settings.tls_ca
        while True:
            try:
                with http_client(key=None, timeout=_HEALTH_TIMEOUT_S, ca=ca) as client:
                    answer = client.get(f"{self.base_url}/health")
            except httpx.HTTPError as error:
                if time.monotonic() >= until:
                    raise ConnectionError(f"can't be reached: {error!r}") from error
            else:
                if answer.is_success:
                    return
                if _is_draining(answer):
                    raise ConnectionError("the router is draining and takes no new requests")
            time.sleep(retry_interval)

    def _prepare_session(self) -> None:
        settings, session = self._settings, self.session
        session.trust_env = False  # a proxy of the environment is not on the way to the router
        if settings.router_api_key is not None:
            session.headers["Authorization"] = f"Bearer {settings.router_api_key}"
        if settings.tls_ca is not None:
            session.verify = str(settings.tls_ca)
        statuses: dict[str, Any] = {"status_forcelist": _ASKED_AGAIN, "respect_retry_after_header": False}
        for adapter in session.adapters.values():
            adapter.max_retries = adapter.max_retries.new(connect=0, read=0, **statuses)


def _is_draining(answer: httpx.Response) -> bool:
    try:
        said = answer.json()
    except ValueError:  # from a proxy
        return False
    return isinstance(said, dict) and said.get("draining") is True


def _sampling(args: Any) -> dict[str, Any]:
    return {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p if args.min_p is not None else 0.0,
        "repetition_penalty": args.repetition_penalty,
        "generation_kwargs": args.generation_kwargs,
    }


class RelayWeights:
    """``AsyncGRPOTrainer(weight_transfer=RelayWeights(relay_url), ...)``: the relay instead of NCCL.

    Workers go on generating while weights are on their way, and change between two steps. Keeps a copy of
    the weights on the host, as TRL hands out each tensor only for a moment.
    """

    def __init__(self, relay_url: str, run_id: str | None = None, **publisher: Any) -> None:
        """``publisher`` has further settings of WeightPublisher."""
        self._relay_url = relay_url
        self._run_id = run_id
        self._settings = publisher
        self._weights: dict[str, torch.Tensor] = {}
        self._publisher: WeightPublisher | None = None
        self._sent: Future[SyncReport] | None = None

    @property
    def version(self) -> WeightVersion | None:
        """The version that was published last, once all of it is sent. Raises: RelayError."""
        return self._sent.result().version if self._sent is not None else None

    def init_weight_transfer(self) -> None:
        """Does nothing: there is no group to join."""

    def pause(self) -> None:
        """Does nothing: nothing has to stop."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publishes what TRL streams, and sends it behind the next step. Raises: RelayError, also for the
        version before.
        """
        for name, tensor in iterator:
            kept = self._weights.get(name)
            if kept is None:
                self._weights[name] = tensor.detach().to("cpu", copy=True)
            else:
                kept.copy_(tensor.detach())
        if self._publisher is None:
            self._publisher = WeightPublisher(self._weights, self._relay_url, self._run_id, **self._settings)
        if self._sent is not None:
            self._sent.result()  # a relay that is lost ends the training
        self._sent = self._publisher.publish_async()

    def resume(self) -> None:
        """Does nothing: nothing was stopped."""

    def destroy(self) -> None:
        """Closes the connection. What was published stays in the relay."""
        if self._publisher is not None:
            self._publisher.close()
