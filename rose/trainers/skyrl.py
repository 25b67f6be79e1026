"""SkyRL's turns on a ROSE router, and its weights over a ROSE relay.

This module is an entry point of SkyRL's trainer. SkyRL's loop, agent loop and FSDP workers stay as they are.
Its client asks the router and tells the engines nothing, and its policy workers publish what they have
gathered. SkyRL starts no engines, and its GPUs only train.

In SkyRL's configuration: ``trainer.override_entrypoint=rose.trainers.skyrl``,
``trainer.placement.colocate_all=false``, ``generator.inference_engine.run_engines_locally=false``,
``generator.inference_engine.external_proxy_url=http://router:8100``,
``generator.inference_engine.served_model_name=policy`` and
``generator.inference_engine.rose.weights={relay_url: "embedded://relay:8400", run_id: my-run}``.
The router's key, if it has one, is ROSE_ROUTER_API_KEY, because SkyRL logs its whole configuration.
A trainer with an entry point of its own calls ``run(MyExp)``, where MyExp extends RouterPPOExp.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import ray
import torch
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteGenerateClient,
    RemoteInferenceClient,
)
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
from skyrl.train.config import GeneratorConfig, InferenceEngineConfig, SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import initialize_ray, validate_cfg

from rose.config import Settings
from rose.http import JOB_HEADER, RUN_HEADER, urls_of
from rose.trainers.gathered import GatheredWeights
from rose.trainers.router import routers_of

_ENGINE = "generator.inference_engine"
_KEY = f"{_ENGINE}.rose"
_ENTRYPOINT = "trainer.override_entrypoint="


@dataclass
class RouterEngineConfig(InferenceEngineConfig):
    """SkyRL's settings of engines, with ROSE's."""

    rose: dict[str, Any] = field(default_factory=dict)
    """``weights``: those of GatheredWeights. ``job``, ``run``: the RL job and the training run, if the router
    has several."""


@dataclass
class RouterGeneratorConfig(GeneratorConfig):
    """SkyRL's settings of rollouts, with ROSE's."""

    inference_engine: RouterEngineConfig = field(default_factory=RouterEngineConfig)


@dataclass
class RouterTrainConfig(SkyRLTrainConfig):
    """SkyRL's whole configuration, with ROSE's settings."""

    generator: RouterGeneratorConfig = field(default_factory=RouterGeneratorConfig)


class _NamedGenerateClient(RemoteGenerateClient):
    """SkyRL's connections, whose requests name the job and have the router's key."""

    def __init__(self, proxy_url: str, headers: dict[str, str]) -> None:
        super().__init__(proxy_url=proxy_url)
        self._headers = headers

    async def _get_session(self) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session()
        session.headers.update(self._headers)
        return session


@dataclass
class RouterInferenceClient(RemoteInferenceClient):
    """SkyRL's client, which sends all turns to the router. Pausing engines and emptying their caches do
    nothing: an engine takes new weights between two steps, and never uses what it has cached under others."""

    job: str | None = None
    run: str | None = None

    def _get_generate_client(self) -> RemoteGenerateClient:
        if self._generate_client is None:
            key = Settings.from_environment().router_api_key
            bearer = f"Bearer {key}" if key is not None else None
            named = {"Authorization": bearer, JOB_HEADER: self.job, RUN_HEADER: self.run}
            given = {name: str(value) for name, value in named.items() if value is not None}
            self._generate_client: Any = _NamedGenerateClient(self.proxy_url, given)
        return self._generate_client

    def _get_semaphores(self) -> tuple[None, None]:
        return None, None  # the router queues; SkyRL would send it as many turns as one engine takes

    async def pause_generation(self, clear_cache: bool = False) -> dict[str, Any]:
        """Does nothing: turns go on while weights change."""
        return {}

    async def resume_generation(self) -> dict[str, Any]:
        """Does nothing: nothing was paused."""
        return {}

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Any]:
        """Does nothing: the engine itself leaves out what older weights have cached."""
        return {}


class RelayPolicyWorker(FSDPPolicyWorkerBase):
    """SkyRL's FSDP worker of the policy, which publishes where SkyRL's own sends to engines."""

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """Finds out in which dtypes to publish. Raises: ValueError; FrameError or OSError on a checkpoint
        that is given and can't be read."""
        given, origin = inference_engine_cfg.rose.get("weights", {}), self.cfg.policy.model.path
        routers = inference_engine_cfg.external_proxy_url
        self._published = GatheredWeights(given, f"{_KEY}.weights", origin, "skyrl", routers)
        # Of float32, so that the publisher casts each tensor once, to what the checkpoint has.
        self._gathered = self._build_weight_source(torch.float32, "nccl")

    async def broadcast_to_inference_engines(
        self, inference_engine_client: Any, inference_engine_cfg: Any, model_id: str | None = None
    ) -> None:
        """Publishes a version. All ranks call it together. Raises: RelayError, WorkerError, ValueError."""
        is_tied = self.model.model.config.tie_word_embeddings
        await self._weight_sync_thread(self._published.publish, self._gathered, has_tied_head=is_tied)
        torch.distributed.barrier()


class RelayPPOTrainer(RayPPOTrainer):
    """SkyRL's trainer, whose policy workers publish."""

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:
        """Starts the workers."""
        super().build_models(ray.remote(num_gpus=1)(RelayPolicyWorker), CriticWorker, RefWorker)


class RouterPPOExp(BasePPOExp):
    """SkyRL's experiment, which makes the client and the trainer."""

    def get_inference_client(self) -> RouterInferenceClient:
        """Returns a client of the router, or of the first of several."""
        engine = self.cfg.generator.inference_engine
        url, *_ = urls_of(engine.external_proxy_url)
        return RouterInferenceClient(
            proxy_url=url,
            server_urls=[url],
            data_parallel_size=1,
            model_name=engine.served_model_name or self.cfg.trainer.policy.model.path,
            tokenizer=self.tokenizer,
            job=engine.rose.get("job"),
            run=engine.rose.get("run"),
        )

    def get_trainer(self, *args: Any, **kwargs: Any) -> RelayPPOTrainer:
        """Returns the trainer. SkyRL names what it passes."""
        return RelayPPOTrainer(*args, **kwargs)


def _check(cfg: Any) -> None:
    """Fills in the routers' addresses. Raises: ValueError for what a router can't do; ConfigError."""
    engine = cfg.generator.inference_engine
    if unknown := engine.rose.keys() - {"weights", "job", "run"}:
        raise ValueError(f"{_KEY}: {', '.join(sorted(unknown))}: unknown; known are weights, job and run")
    if "relay_url" not in engine.rose.get("weights", {}):
        raise ValueError(f"{_KEY}.weights.relay_url: missing; give the relay that the engines follow")
    if cfg.trainer.strategy != "fsdp":
        raise ValueError(f"trainer.strategy={cfg.trainer.strategy}: must be fsdp")
    if cfg.trainer.policy.model.lora.rank > 0:
        rank = cfg.trainer.policy.model.lora.rank
        raise ValueError(f"trainer.policy.model.lora.rank={rank}: must be 0; whole weights are published")
    for name in ("enable_return_routed_experts", "enable_return_sample_support_set"):
        if getattr(engine, name):
            raise ValueError(f"{_ENGINE}.{name}: must be false; only SkyRL's own vLLM server returns them")
    if engine.offload_kv_for_weight_sync or engine.fp8_weight_sync_mode:
        raise ValueError(
            f"{_ENGINE}.offload_kv_for_weight_sync and .fp8_weight_sync_mode: must not be set; a router's "
            "engines keep their KV, and .rose.weights.quantized_like publishes in fp8"
        )
    engine.external_proxy_url = ",".join(routers_of(engine.external_proxy_url, Settings.from_environment()))


@ray.remote(num_cpus=1)
def _run(exp_cls: Any, cfg: Any) -> None:
    exp_cls(cfg).run()


def run(exp_cls: type[RouterPPOExp] = RouterPPOExp) -> None:
    """Trains with the settings in sys.argv. Raises: ConfigError; ValueError on a setting; what training
    raises."""
    cfg = RouterTrainConfig.from_cli_overrides(
        [each for each in sys.argv[1:] if not each.startswith(_ENTRYPOINT)]
    )
    _check(cfg)
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(_run.remote(exp_cls, cfg))


def main() -> None:
    """The entry point that SkyRL calls."""
    run()
