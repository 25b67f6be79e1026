"""Stock vLLM on the CPU for the demo's tests; imported by the process that runs it."""

from pathlib import Path

from forked_engines import make_engine


def first_token(model: Path, prompt: list[int]) -> tuple[int, float]:
    """The greedy choice and its logprob, of an engine made in this process: call it in a ``Fork``."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    engine = make_engine(model, None, dtype="bfloat16", max_model_len=64, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, detokenize=False)
    (answer,) = engine.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
    (token,) = answer.outputs[0].token_ids
    return token, answer.outputs[0].logprobs[0][token].logprob
