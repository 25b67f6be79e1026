"""Run as a program: TRL's unmodified client, trainer and rollout worker on a router; prints JSON.

A program of its own, because TRL decides at import whether vLLM is installed, and its worker spawns a child
that imports the main module.
"""

import json
import sys
from statistics import fmean
from typing import Any

MAX_TOKENS = 6
NUM_STEPS = 2


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [fmean(token % 2 == 0 for token in ids) if ids else 0.0 for ids in completion_ids]


def ask(url: str) -> dict[str, Any]:
    """VLLMClient: batches of token ids and n, and chat."""
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient(base_url=url)
    sampling: dict[str, Any] = {"n": 2, "top_k": 1, "max_tokens": 8, "logprobs": 2}
    generated = client.generate([[5, 6, 7], [8, 9, 10, 11]], **sampling)
    chatted = client.chat([[{"role": "user", "content": "w9 w10"}]], temperature=0.0, max_tokens=4)
    return {"generate": generated, "chat": chatted}


def train(router_url: str, relay_url: str, model_dir: str, scratch_dir: str) -> dict[str, Any]:
    """GRPOTrainer: turns by TRL's own client, weights into the relay."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from rose.ports import free_port
    from rose.trainers.router import router_announcer
    from rose.trainers.trl import PublishWeights, RouterRollouts
    from rose.transfer.publish.publisher import WeightPublisher

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    publisher = WeightPublisher(model, relay_url, "grpo")
    config = GRPOConfig(
        output_dir=scratch_dir,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=MAX_TOKENS,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    routers = f"http://127.0.0.1:{free_port()},{router_url}"  # the first is dead
    announce = router_announcer(routers, None, lambda: publisher.version)
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6", "w7 w8 w9"]}),
        reward_funcs=even_tokens,
        rollout_func=RouterRollouts(routers, announce),
        callbacks=[PublishWeights(publisher)],
    )
    trainer.train()
    version = publisher.version
    publisher.close()
    return {"steps": trainer.state.global_step, "version": str(version)}


def roll_out(router_url: str, relay_url: str, model_dir: str) -> dict[str, Any]:
    """The rollout worker of AsyncGRPOTrainer, which itself needs a GPU, and its weights' way."""
    import torch
    from accelerate import PartialState
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.chat_template_utils import qwen3_chat_template
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

    from rose.trainers.trl import RelayWeights

    PartialState()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = qwen3_chat_template  # TRL must know how answers are to be parsed
    worker = AsyncRolloutWorker(
        model_name="tiny",
        dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": f"w{i}"}] for i in range(5, 13)]}),
        reward_funcs=[even_tokens],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=2,
        vllm_server_url=router_url,
        max_tokens=MAX_TOKENS,
    )
    worker.start()
    try:
        samples = [worker.rollout_buffer.get(timeout=600) for _ in range(4)]
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
        weights = RelayWeights(relay_url, "async")
        weights.init_weight_transfer()
        versions = []
        for _ in range(2):
            weights.pause()
            weights.send_weights(iter(model.named_parameters()))
            weights.resume()
            versions.append(str(weights.version))
            with torch.no_grad():
                model.lm_head.weight.add_(1.0)
        weights.destroy()
    finally:
        worker.stop()
    trained = [int(sample.completion_mask.sum()) for sample in samples]
    logprobs = [int((sample.old_log_probs < 0).sum()) for sample in samples]
    return {"tokens": trained, "logprobs": logprobs, "versions": versions}


def main() -> None:
    router_url, engine_url, relay_url, model_dir, scratch_dir = sys.argv[1:]
    answers = {"routed": ask(router_url), "direct": ask(engine_url)}
    answers["train"] = train(router_url, relay_url, model_dir, scratch_dir)
    answers["rollout"] = roll_out(router_url, relay_url, model_dir)
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
