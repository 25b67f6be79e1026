"""verl's rollouts on a ROSE router.

This module has a client class for verl's LLMServerManager, and the agent loop manager that makes verl use it.
verl's agent loops stay as they are, and a trajectory keeps its name over its turns. verl's own servers are
not used.

In verl's configuration:
``actor_rollout_ref.rollout.agent.agent_loop_manager_class=rose.trainers.verl.RouterAgentLoopManager`` and
``+actor_rollout_ref.rollout.custom.rose={router_url: http://router:8100, model: policy}``.
"""

from typing import Any

from verl.experimental.agent_loop import AgentLoopManager
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rose.trainers.turns import RouterTurns

_MEDIA = ("image_data", "video_data", "audio_data")


class RouterLLMClient(LLMServerClient):
    """``LLMServerManager.get_client(RouterLLMClient)``, or from the configuration as above.

    verl sends it to its workers, so it opens no connection before its first turn.
    """

    def __init__(self, config: Any, load_balancer_handle: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config, load_balancer_handle=load_balancer_handle, **kwargs)
        rollout = config.actor_rollout_ref.rollout
        custom = rollout.custom if rollout.custom is not None else {}
        if "rose" not in custom:
            raise ValueError("actor_rollout_ref.rollout.custom.rose: missing; give router_url and model")
        self._router: dict[str, Any] = {name: str(value) for name, value in custom["rose"].items()}
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


class RouterAgentLoopManager(AgentLoopManager):
    """verl's manager of agent loops, whose loops ask the router."""

    def __init__(self, config: Any, llm_client: LLMServerClient, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, RouterLLMClient(config=config), *args, **kwargs)
