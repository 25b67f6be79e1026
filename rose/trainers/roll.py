"""ROLL's agents on a ROSE router.

This module has an LLM proxy for ROLL's registry, and the environment worker that registers it. ROLL's
environment managers stay as they are, and get what ROLL's own proxy gives them: the padded batch of prompt
and answer, with the logprobs. ROLL's own engines and its scheduler are not used. roll_weights.py publishes.

In ROLL's configuration, for ``train_env_manager`` and ``val_env_manager``:
``worker_cls: rose.trainers.roll.RouterEnvironmentWorker`` and
``llm_proxy: {proxy_type: rose, proxy_config: {router_url: "http://router:8100", model: policy}}``; the
settings of roll_weights.py may stand beside these.
Tested with ROLL 0.3 at commit 8eb27cc (August 2026), which is on no package index.
"""

import asyncio
from threading import Thread
from typing import Any
from uuid import uuid4

import torch
from roll.pipeline.agentic.environment_worker import EnvironmentWorker
from roll.pipeline.agentic.llm_proxy.base_llm_proxy import BaseLLMProxy, register_llm_proxy
from roll.utils.functionals import (
    concatenate_input_and_output,
    gather_unpadded_input_ids,
    postprocess_generate,
)

from rose.trainers.turns import RouterTurns, TurnAnswer

Messages = list[dict[str, Any]]

_NAMES = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop",
}
"""ROLL's name of each setting, and vLLM's."""


class RouterEnvironmentWorker(EnvironmentWorker):
    """ROLL's own worker. Its actor imports it from here, which registers the proxy in that process."""


@register_llm_proxy("rose")
class RouterLLMProxy(BaseLLMProxy):
    """The proxy of one environment. ROLL calls it from several threads, so its connections have their own."""

    def __init__(self, generate_scheduler: Any, llm_proxy_config: Any, tokenizer: Any, env: Any) -> None:
        super().__init__(generate_scheduler, llm_proxy_config, tokenizer, env)
        given = {name: each for name, each in llm_proxy_config.proxy_config.items() if name != "weights"}
        self._turns = RouterTurns(**given)
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="rose-turns", daemon=True).start()
        self._session: str | None = None
        self._asked: Messages = []
        self._is_answered = False

    def generate(self, messages: Messages, lm_input: Any, generation_config: dict[str, Any]) -> Any:
        """Answers as ROLL expects; None if the turn was aborted. Raises: WorkerError; ValueError for
        images."""
        if "multi_modal_data" in lm_input.non_tensor_batch:
            raise ValueError("multi_modal_data: the router takes token ids alone")
        if generation_config.get("num_return_sequences", 1) != 1:
            raise ValueError(f"num_return_sequences={generation_config['num_return_sequences']}: must be 1")
        session = self._session_of(messages, lm_input.meta_info.pop("src_rank"))
        (prompt_ids,) = gather_unpadded_input_ids(
            input_ids=lm_input.batch["input_ids"], attention_mask=lm_input.batch["attention_mask"]
        )
        asked = self._turns.complete(session, prompt_ids, self._sampling(generation_config))
        turn = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        self._is_answered = turn.finish_reason != "abort"
        return self._answer(lm_input, turn) if self._is_answered else None

    def _session_of(self, messages: Messages, env_id: Any) -> str:
        """Names the trajectory that these messages belong to.

        An environment plays one trajectory after the other under one number. If that number were the session,
        a router that keeps a trajectory to one version would bind all of them to the weights of the first.
        """
        num_asked = len(self._asked)
        is_next_turn = messages[:num_asked] == self._asked and len(messages) > num_asked
        is_asked_again = messages == self._asked and not self._is_answered
        if self._session is None or not (is_next_turn or is_asked_again):
            self._session = f"roll-{env_id}-{uuid4().hex}"
        self._asked = list(messages)
        return self._session

    def _sampling(self, given: dict[str, Any]) -> dict[str, Any]:
        sampling = {ours: given[name] for name, ours in _NAMES.items() if given.get(name) is not None}
        # As in ROLL's own proxy, its tokenizer decides where an answer ends, whatever the engine's model
        # says.
        ends = [self.tokenizer.eos_token_id, self.tokenizer.pad_token_id]
        return {**sampling, "stop_token_ids": [token for token in ends if token is not None]}

    def _answer(self, lm_input: Any, turn: TurnAnswer) -> Any:
        sequence = concatenate_input_and_output(
            input_ids=lm_input.batch["input_ids"],
            output_ids=torch.tensor([turn.token_ids]),
            num_return_sequences=1,
        )
        answer = postprocess_generate(
            prompts=lm_input,
            output=sequence,
            num_return_sequences=1,
            sequence_length=sequence.shape[-1],
            eos_token_id=[self.tokenizer.eos_token_id, self.tokenizer.pad_token_id],
            pad_token_id=self.tokenizer.pad_token_id,
            pad_to_seq_len=False,
            output_logprobs=[turn.logprobs],
        )
        answer.non_tensor_batch = lm_input.non_tensor_batch
        answer.meta_info = lm_input.meta_info
        return answer
