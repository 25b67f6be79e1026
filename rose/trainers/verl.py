"""verl's turns on a ROSE router, and its weights over a ROSE relay.

verl's trainers load two parts in place of their own: an agent loop manager, whose loops ask the router, and a
rollout named ``rose``. It starts no servers, and publishes the weights that verl hands it after each step.
verl's agent loops and trainers stay as they are, and a trajectory keeps its name over its turns. It serves
the trainer modes ``sync`` and ``colocate_async``; ``separate_async`` wants GPUs of its own for its rollouts.

In the environment of all of verl's processes: ``VERL_USE_EXTERNAL_MODULES=rose.trainers.verl``.
In verl's configuration:
``actor_rollout_ref.rollout.name=rose``, ``actor_rollout_ref.rollout.tensor_model_parallel_size=1``,
``+actor_rollout_ref.rollout.agent.agent_loop_manager_class=rose.trainers.verl.RouterAgentLoopManager`` and
``+actor_rollout_ref.rollout.custom.rose={router_url: "http://router:8100", model: policy, weights:
{relay_url: "embedded://relay:8400", run_id: policy}}``.
"""

from collections.abc import Iterable
from typing import Any

import torch
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from rose.trainers.gathered import GatheredWeights
from rose.trainers.turns import RouterTurns

_KEY = "actor_rollout_ref.rollout.custom.rose"
_MEDIA = ("image_data", "video_data", "audio_data")


def _settings(rollout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the settings of turns and of weights. Raises: ValueError if there are none."""
    custom = rollout.custom if rollout.custom is not None else {}
    if "rose" not in custom:
        raise ValueError(f"{_KEY}: missing; give router_url and model")
    given = dict(custom["rose"])
    weights = dict(given.pop("weights", {}))
    return {name: str(value) for name, value in given.items()}, weights


class RouterLLMClient(LLMServerClient):
    """``LLMServerManager.get_client(RouterLLMClient)``, or from the configuration as above.

    verl sends it to its workers, so it opens no connection before its first turn.
    """

    def __init__(self, config: Any, load_balancer_handle: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config, load_balancer_handle=load_balancer_handle, **kwargs)
        self._router, _ = _settings(config.actor_rollout_ref.rollout)
        self._turns: RouterTurns | None = None

    async def generate(
        self, request_id: Any, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Answers as verl expects; ``request_id`` names the trajectory. Raises: WorkerError; ValueError for
        media."""
        if given := [name for name in _MEDIA if kwargs.get(name)]:
            raise ValueError(f"{', '.join(given)}: the router takes token ids alone; media go by chat")
        if self._turns is None:
            self._turns = RouterTurns(**self._router)
        sampling = self._sampling(sampling_params, len(prompt_ids))
        turn = await self._turns.complete(str(request_id), prompt_ids, sampling)
        versions = turn.versions if turn.versions else (None,)
        return TokenOutput(
            token_ids=turn.token_ids,
            log_probs=turn.logprobs if sampling_params.get("logprobs") else None,
            routed_experts=turn.routed_experts,
            stop_reason="aborted" if turn.finish_reason == "abort" else "completed",
            extra_fields={
                "global_steps": versions[-1],
                "min_global_steps": versions[0],
                "max_global_steps": versions[-1],
            },
        )

    def _sampling(self, given: dict[str, Any], num_prompt_tokens: int) -> dict[str, Any]:
        """Adds verl's own defaults for what an agent loop has not set."""
        rollout = self.config.actor_rollout_ref.rollout
        sampling = {name: value for name, value in given.items() if name != "logprobs"}
        limit = sampling.pop("max_new_tokens", None)
        if limit is not None:
            sampling.setdefault("max_tokens", limit)
        left = rollout.prompt_length + rollout.response_length - num_prompt_tokens
        sampling.setdefault("max_tokens", max(1, min(rollout.response_length, left)))
        return sampling


class RouterAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager of agent loops, whose loops ask the router."""

    def __init__(self, config: Any, llm_client: LLMServerClient, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, RouterLLMClient(config=config), *args, **kwargs)


class RouterReplica(RolloutReplica):
    """What verl takes for one of its inference servers. It is none: sleeping, waking and aborting do nothing,
    because the router's workers go on with the turns of before."""

    async def launch_servers(self) -> None:
        self._server_address = f"rose-{self.replica_rank}"


class RelayRollout(BaseRollout):
    """Each training process's end of the rollouts: it publishes the weights (gathered.py)."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        router, given = _settings(self.config)
        routers = (router.get("router_url"), router.get("key"))
        origin = self.model_config.local_path
        self._weights = GatheredWeights(given, f"{_KEY}.weights", origin, "verl", *routers)

    async def resume(self, tags: list[str]) -> None:
        """Does nothing: the engines gave up nothing."""

    async def release(self) -> None:
        """Does nothing: the engines keep what they have."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Publishes a version. All ranks call it together. Raises: RelayError, WorkerError, ValueError."""
        if peft_config is not None:
            raise ValueError("an adapter alone: set actor_rollout_ref.model.lora.merge=True to publish it")
        if global_steps is None:
            return  # verl wakes servers that slept; the weights are those of before
        self._weights.publish(weights, has_tied_head=self.model_config.share_embeddings_and_output_weights)


RolloutReplicaRegistry.register("rose", lambda: RouterReplica)
_ROLLOUT_REGISTRY["rose", "async"] = f"{__name__}.{RelayRollout.__name__}"
