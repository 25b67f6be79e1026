"""One rank of a data-parallel trainer, which trains alone and then as a guest, and compares the weights.

`python -m tests.trainers.fine_tune.ranked_trainer POOL FOLDER [STEPS LATE_S]`, with torchrun's environment;
with STEPS it is a guest alone, and a rank that is LATE_S late has hung.
"""

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from rose.arguments import run_command
from rose.trainers.fine_tune import ranks
from rose.trainers.fine_tune.callback import SlackCallback
from rose.trainers.fine_tune.sequences import padded

ROWS = [
    {"input_ids": list(range(start, start + 8)), "labels": list(range(start, start + 8))}
    for start in range(4, 20)
]


def trained(folder: Path, steps: int, callbacks: list[Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
    Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            max_steps=steps,
            use_cpu=True,
            ddp_backend="gloo",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=ROWS,
        data_collator=lambda batch: padded(batch, 0),
        callbacks=callbacks,
    ).train()
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def main(argv: Sequence[str]) -> int:
    pool, folder, *steps = argv
    slack = SlackCallback(pool)
    if steps:
        ranks.LATE_S = ranks.HUNG_S = float(steps[1])
        # TrainingArguments hands its own timeout on only with GPUs.
        PartialState(cpu=True, timeout=timedelta(seconds=ranks.HUNG_S))
        with ranks.Ranks.parting("trainer"):
            trained(Path(folder), int(steps[0]), [slack])
        return 0
    alone = trained(Path(folder), 3, [])
    as_guest = trained(Path(folder), 3, [slack])
    assert slack.guest is not None and torch.distributed.get_world_size() == 2
    is_same = all(torch.equal(alone[name], tensor) for name, tensor in as_guest.items())
    found = {"is_same": is_same, "grants": slack.guest.num_grants, "computed_s": slack.guest.computed_s}
    (Path(folder) / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    with ranks.Ranks.parting("trainer"):
        return 0


if __name__ == "__main__":
    sys.exit(run_command("trainer", main, sys.argv[1:]))
