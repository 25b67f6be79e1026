"""Run as a program: TRL's GRPO on a toy reward, one JSON line per step.

The reward of a completion is the part of its tokens whose id is a multiple of four. Turns go to an endpoint
by TRL's own client; each step's weights go to the relay, and the next step waits until a worker runs them.
"""

import argparse
import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

MULTIPLE = 4
GROUP_SIZE, NUM_PROMPTS, COMPLETION_TOKENS = 8, 2, 8
LEARNING_RATE = 2e-3
ACK_TIMEOUT_S = 240.0
"""Both engines may be starting anew."""


def toy_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A TRL reward function."""
    return [fmean(token % MULTIPLE == 0 for token in ids) if ids else 0.0 for ids in completion_ids]


def train(args: argparse.Namespace, scratch_dir: str) -> None:
    """Trains for ``args.steps`` steps."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rose.trainers.trl import PublishWeights, RouterRollouts
    from rose.transfer.publish.publisher import WeightPublisher

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    publisher = WeightPublisher(model, args.relay, args.run)

    class StepLines(TrainerCallback):
        """Appends a line when TRL has logged a step."""

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            if logs is not None and "reward" in logs:
                line = {"step": state.global_step, "reward": float(logs["reward"]), "t_s": time.monotonic()}
                with args.events.open("a") as events:
                    events.write(json.dumps(line) + "\n")

    config = GRPOConfig(
        output_dir=scratch_dir,
        seed=args.seed,
        max_steps=args.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        per_device_train_batch_size=GROUP_SIZE * NUM_PROMPTS,
        num_generations=GROUP_SIZE,
        max_completion_length=COMPLETION_TOKENS,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    prompts = [str(tokenizer.decode([5 + index, 9, 12 + index])) for index in range(NUM_PROMPTS)]
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=toy_reward,
        rollout_func=RouterRollouts(args.endpoint),
        callbacks=[PublishWeights(publisher, 1, ACK_TIMEOUT_S), StepLines()],
    )
    trainer.train()
    publisher.close()


def main() -> int:
    """Status 0 when it has trained to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--relay", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--events", required=True, type=Path)
    parser.add_argument("--steps", required=True, type=int)
    parser.add_argument("--seed", required=True, type=int)
    args = parser.parse_args()
    with redirect_stdout(sys.stderr), TemporaryDirectory(prefix="rose-toy-") as scratch_dir:
        train(args, scratch_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
