"""Greedy answers of stock vLLM, the reference that engines under ROSE are compared with.

Owns an offline run in a process of its own: ``python -m rose.engine.stock JOBS.json ANSWERS.json`` with
``STOCK_ENV`` set. JOBS is a list of objects {model, prompts, max_tokens (one per prompt), max_model_len,
batched, dtype (vLLM chooses if absent), adapters (LoRA folders as PEFT saves them, one per prompt)}. ANSWERS
has one list per job, with {tokens, logprobs} per prompt.
vLLM is imported once, and the models run one after the other, each in its own fork. Never loads the plugin.
"""

import json
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rose.engine.amx import ask_for_amx, portable_attention

STOCK_ENV = {
    "VLLM_PLUGINS": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRITON_F32_DEFAULT": "ieee",  # as in rose.measure.rig.ENGINE_ENV
}
CHUNK_TOKENS = 512
"""A rollout engine's token limit per step, so that prefills are split in the same way."""


def answer(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Loads the job's model and runs its prompts, all at once if ``batched``, else one by one."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.v1.executor import UniProcExecutor

    adapters: list[str] = job.get("adapters", [])
    llm = LLM(
        job["model"],
        dtype=job.get("dtype", "auto"),
        attention_backend=portable_attention(job["model"]),
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=16,
        max_num_batched_tokens=CHUNK_TOKENS,
        enable_prefix_caching=False,
        distributed_executor_backend=UniProcExecutor,
        **_lora_options(adapters),
    )
    loras = _loras(adapters)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in job["prompts"]]
    params = [
        SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, logprobs=1, detokenize=False)
        for limit in job["max_tokens"]
    ]
    batches = [range(len(prompts))] if job["batched"] else [range(i, i + 1) for i in range(len(prompts))]
    answers = []
    for batch in batches:
        chosen = slice(batch.start, batch.stop)
        lora = loras[chosen] if loras else None
        for output in llm.generate(prompts[chosen], params[chosen], use_tqdm=False, lora_request=lora):
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            logprobs = [at[token].logprob for at, token in zip(completion.logprobs, tokens, strict=True)]
            answers.append({"tokens": tokens, "logprobs": logprobs})
    return answers


def _lora_options(adapters: list[str]) -> dict[str, Any]:
    if not adapters:
        return {}
    ranks = [json.loads((Path(each) / "adapter_config.json").read_text())["r"] for each in adapters]
    most = next(size for size in (8, 16, 32, 64, 128, 256) if size >= max(ranks))  # what vLLM takes
    return {"enable_lora": True, "max_loras": len(set(adapters)), "max_lora_rank": most}


def _loras(adapters: list[str]) -> list[Any]:
    from vllm.lora.request import LoRARequest

    folders = list(dict.fromkeys(adapters))
    return [LoRARequest(each, 1 + folders.index(each), each) for each in adapters]


def _run(job: dict[str, Any], sink: Connection) -> None:
    sink.send(answer(job))


def main(argv: list[str]) -> int:
    """Runs the jobs. The answers' file appears only when it is complete."""
    import vllm  # noqa: F401 - the forks inherit it

    ask_for_amx()
    jobs_path, answers_path = Path(argv[0]), Path(argv[1])
    answers = []
    for job in json.loads(jobs_path.read_text()):
        source, sink = get_context("fork").Pipe(duplex=False)
        child = get_context("fork").Process(target=_run, args=(job, sink), daemon=True)
        child.start()
        sink.close()
        answers.append(source.recv())
        child.join()
    draft = answers_path.with_suffix(".partial")
    draft.write_text(json.dumps(answers))
    draft.replace(answers_path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
