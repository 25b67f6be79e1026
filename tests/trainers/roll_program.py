"""Run as a program: two episodes of FrozenLake in ROLL's own environment worker on Ray; prints JSON.

A program of its own, because ROLL sets environment variables and the root logger, and starts Ray.
"""

import json
import sys
from pathlib import Path
from typing import Any

MAX_TOKENS = 4
NUM_TURNS = 3
NUM_EPISODES = 2
VOCABULARY = 997
"""What the scripted worker draws from; the special tokens are beyond, so that no answer has one."""


class KeepAll:
    """Which groups to leave out: none. ROLL's own filter loads its whole pipeline."""

    def __init__(self, *_: Any) -> None: ...

    def filter(self, **_: Any) -> bool:
        return False


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<eos>", "<pad>", "<unk>"]
    words = [f"w{i}" for i in range(VOCABULARY)] + special
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m['content'] }} <eos> {% endfor %}w2"
    tokenizer.save_pretrained(folder)


def pipeline_config(router_url: str, folder: Path) -> Any:
    from roll.configs import GeneratingArguments
    from roll.configs.worker_config import WorkerConfig
    from roll.pipeline.agentic.agentic_config import AgenticConfig, EnvManagerConfig, LLMProxyConfig

    def environments() -> Any:
        proxy = {"router_url": router_url, "model": "scripted"}
        return EnvManagerConfig(
            worker_cls="rose.trainers.roll.RouterEnvironmentWorker",
            llm_proxy=LLMProxyConfig(proxy_type="rose", proxy_config=proxy),
            group_filter_cls="tests.trainers.roll_program.KeepAll",
            tags=["FrozenLake"],
            num_env_groups=1,
            num_groups_partition=[1],
        )

    frozen_lake = {
        "env_type": "frozen_lake",
        "max_steps": NUM_TURNS,
        "max_tokens_per_step": MAX_TOKENS,
        "agent_system_template": "w3",
        "agent_template": "w4 {observation}",
        "env_config": {"is_slippery": False},
    }
    return AgenticConfig(
        pretrain=str(folder),
        exp_name="frozen-lake",
        output_dir=str(folder),
        logging_dir=str(folder),
        sequence_length=512,
        rollout_batch_size=NUM_EPISODES,
        val_batch_size=1,
        actor_infer=WorkerConfig(generating_args=GeneratingArguments(max_new_tokens=64)),
        train_env_manager=environments(),
        val_env_manager=environments(),
        custom_envs={"FrozenLake": frozen_lake},
    )


def play(config: Any) -> Any:
    """The batch of finished trajectories, as ROLL's pipeline takes it from its queue."""
    import ray
    from roll.distributed.scheduler.rollout_scheduler import GroupQueueManager
    from roll.utils.import_utils import safe_import_class

    environments = config.train_env_manager
    actor: Any = GroupQueueManager
    queue = actor.remote(config, environments, "train")
    worker_cls: Any = safe_import_class(environments.worker_cls)
    worker = ray.remote(worker_cls).options(max_concurrency=10).remote(worker_config=environments)
    ray.get(worker.initialize.remote(config, None, queue))
    ray.get(worker.update_step.remote(0, None))
    ray.get(queue.advance_step.remote(0))
    loop = worker.run_rollout_loop.remote(0)
    batch = ray.get(queue.get_batch.remote(NUM_EPISODES, 0))
    ray.get(worker.stop.remote())
    ray.get(queue.shutdown.remote())
    ray.get(loop)
    return batch


def main(router_url: str, folder: Path) -> None:
    import ray

    make_tokenizer(folder)
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    try:
        batch = play(pipeline_config(router_url, folder))
    finally:
        ray.shutdown()
    names = ("input_ids", "response_mask", "attention_mask", "infer_logprobs")
    told = [{name: each.batch[name][0].tolist() for name in names} for each in batch]
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
