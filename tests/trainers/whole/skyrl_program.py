"""Run as a program: SkyRL's own GRPO trainer with FSDP2 on the processor, its turns and weights through ROSE.

`python skyrl_program.py ROUTER RELAY MODEL FOLDER`. A program of its own, because SkyRL starts Ray and sets
the environment.
"""

import json
import sys
from pathlib import Path
from typing import Any

RUN = "skyrl"
NUM_STEPS = 3
MAX_TOKENS = 6
BATCH = 4
SAMPLES = 2
HOOK = "tests.trainers.whole.skyrl_cpu.install"


def overrides(router_url: str, relay_url: str, model: str, folder: Path) -> dict[str, Any]:
    from tests.trainers.whole.skyrl_cpu import ENVIRONMENT, NUM_GPUS

    engine = "generator.inference_engine"
    return {
        "trainer.override_entrypoint": "rose.trainers.skyrl",
        "trainer.placement.colocate_all": "false",
        "trainer.placement.policy_num_gpus_per_node": NUM_GPUS,
        f"{engine}.run_engines_locally": "false",
        f"{engine}.external_proxy_url": router_url,
        f"{engine}.served_model_name": "tiny",
        f"{engine}.rose.weights.relay_url": relay_url,
        f"{engine}.rose.weights.run_id": RUN,
        f"{engine}.rose.weights.num_workers": 1,
        f"{engine}.enable_ray_prometheus_stats": "false",
        "data.train_data": f"['{folder / 'train.parquet'}']",
        "data.dataloader.num_workers": 0,
        "environment.env_class": ENVIRONMENT,
        "generator.n_samples_per_prompt": SAMPLES,
        "generator.sampling_params.max_generate_length": MAX_TOKENS,
        "trainer.algorithm.use_kl_loss": "false",
        "trainer.policy.model.path": model,
        "trainer.policy.optimizer_config.lr": 1e-3,
        "trainer.train_batch_size": BATCH,
        "trainer.policy_mini_batch_size": BATCH,
        "trainer.micro_train_batch_size_per_gpu": 2,
        "trainer.micro_forward_batch_size_per_gpu": 2,
        "trainer.gradient_checkpointing": "false",
        "trainer.flash_attn": "false",
        "trainer.remove_microbatch_padding": "false",
        "trainer.max_training_steps": NUM_STEPS,
        "trainer.eval_interval": -1,
        "trainer.resume_mode": "none",
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": NUM_STEPS,
        "trainer.enable_ray_gpu_monitor": "false",
        "trainer.logger": "console",
        "trainer.export_path": folder / "exports",
        "trainer.ckpt_path": folder / "checkpoints",
        "trainer.log_path": folder / "logs",
    }


def start_ray_with_gpus() -> None:
    """Makes Ray count GPUs, and lets each of its processes begin with the processor in their place."""
    import ray

    from tests.trainers.whole.skyrl_cpu import NUM_GPUS

    init = ray.init

    def with_gpus(runtime_env: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        return init(
            address="local",  # not a cluster that another program has here
            num_cpus=16,
            num_gpus=NUM_GPUS,
            include_dashboard=False,
            object_store_memory=256 << 20,
            runtime_env={**(runtime_env or {}), "worker_process_setup_hook": HOOK},
            **kwargs,
        )

    ray.init = with_gpus


def main() -> None:
    router_url, relay_url, model, folder = sys.argv[1:]
    from tests.trainers.whole import skyrl_cpu

    skyrl_cpu.install()
    start_ray_with_gpus()
    given = overrides(router_url, relay_url, model, Path(folder))
    sys.argv[1:] = [f"{name}={value}" for name, value in given.items()]
    from skyrl.train.entrypoints.main_base import main as train

    train()
    print(json.dumps({"trained": True}), flush=True)


if __name__ == "__main__":
    main()
