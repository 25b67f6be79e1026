"""Run as a program: verl's own PPO trainer with FSDP2 on the processor, its turns and weights through ROSE.

A program of its own, because verl starts Ray and sets the environment.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

RUN = "verl"
NUM_RANKS = 2
NUM_STEPS = 3
MAX_TOKENS = 6
BATCH = 4
SAMPLES = 2


def even_tokens(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The reward: the share of even words."""
    words = [int(word[1:]) for word in solution_str.split() if word[1:].isdigit()]
    return fmean(word % 2 == 0 for word in words) if words else 0.0


def overrides(router_url: str, relay_url: str, model: str, folder: Path, mode: str) -> dict[str, Any]:
    weights = f"{{relay_url: '{relay_url}', run_id: {RUN}, num_workers: 1}}"
    rose = f"{{router_url: '{router_url}', model: tiny, weights: {weights}}}"
    actor = "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    return {
        "hydra.run.dir": folder / "hydra",
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": BATCH,
        "data.max_prompt_length": 16,
        "data.max_response_length": MAX_TOKENS,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.tokenizer_path": folder / "tokenizer",
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": 1e-3,
        f"{actor}.ppo_mini_batch_size": BATCH,
        f"{actor}.ppo_micro_batch_size_per_gpu": 2,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{rollout}.name": "rose",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.n": SAMPLES,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 2,
        f"{rollout}.agent.num_workers": 1,
        f"+{rollout}.agent.agent_loop_manager_class": "rose.trainers.verl.RouterAgentLoopManager",
        f"+{rollout}.custom.rose": rose,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": __file__,
        "reward.custom_reward_function.name": "even_tokens",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": NUM_RANKS,
        "trainer.v1.trainer_mode": mode,
        "trainer.total_training_steps": NUM_STEPS,
        "trainer.val_before_train": False,
        "trainer.save_freq": NUM_STEPS,
        f"{actor}.checkpoint.save_contents": "[hf_model]",
        "trainer.logger": "console",
        "trainer.rollout_data_dir": folder / "rollouts",
        "trainer.default_local_dir": folder / "checkpoints",
        "+ray_kwargs.ray_init.address": "local",  # not a cluster that another program has here
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.num_gpus": NUM_RANKS,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 256 << 20,
    }


def main() -> None:
    router_url, relay_url, model, folder, mode = sys.argv[1:]
    given = overrides(router_url, relay_url, model, Path(folder), mode)
    sys.argv[1:] = [f"{name}={value}" for name, value in given.items()]
    from verl.trainer.main_ppo import main as train

    train()
    print(json.dumps({"trained": True}), flush=True)


if __name__ == "__main__":
    main()
