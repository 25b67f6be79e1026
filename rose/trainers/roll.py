"""ROLL's agents on a ROSE router.

Owns: an LLM proxy for ROLL's registry. Promises: ROLL's environment managers stay as they are, and get what
its own proxy of the policy gives them: the padded batch of prompt and answer, with the logprobs.
Never: touches ROLL's own engines or its scheduler.

Import this module where ROLL's environment managers start, and set
``llm_proxy: {proxy_type: rose, proxy_config: {router_url: "http://router:8100", model: policy}}``.
Written against ROLL at commit 8eb27cc (August 2026), which is on no package index.
"""

import asyncio
from typing import Any

import torch
from roll.pipeline.agentic.llm_proxy.base_llm_proxy import BaseLLMProxy, register_llm_proxy
from roll.utils.functionals import (
    concatenate_input_and_output,
    gather_unpadded_input_ids,
    postprocess_generate,
)

from rose.trainers.turns import RouterTurns, Turn

_NAMES = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop",
}
"""ROLL's word for a setting -> vLLM's."""


@register_llm_proxy("rose")
class RouterLLMProxy(BaseLLMProxy):
    """One per environment; used in that environment's thread alone."""

    def __init__(self, generate_scheduler: Any, llm_proxy_config: Any, tokenizer: Any, env: Any) -> None:
        super().__init__(generate_scheduler, llm_proxy_config, tokenizer, env)
        self._turns = RouterTurns(**llm_proxy_config.proxy_config)
        self._runner = asyncio.Runner()

    def generate(
        self, messages: list[dict[str, str]], lm_input: Any, generation_config: dict[str, Any]
    ) -> Any:
        """ROLL's contract; None for a turn that was aborted. Raises: WorkerError."""
        # The environment names the trajectory, as in ROLL's own affinity.
        session = f"roll-{lm_input.meta_info.pop('src_rank')}"
        (prompt_ids,) = gather_unpadded_input_ids(
            input_ids=lm_input.batch["input_ids"], attention_mask=lm_input.batch["attention_mask"]
        )
        given = generation_config
        sampling = {ours: given[name] for name, ours in _NAMES.items() if given.get(name) is not None}
        turn = self._runner.run(self._turns.complete(session, prompt_ids, sampling))
        return self._answer(lm_input, turn) if turn.finish_reason != "abort" else None

    def _answer(self, lm_input: Any, turn: Turn) -> Any:
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
