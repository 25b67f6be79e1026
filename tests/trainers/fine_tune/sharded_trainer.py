"""One rank of a trainer with sharded weights (FSDP), which trains alone and then as a guest, and compares the
shards.

`python sharded_trainer.py POOL FOLDER VERSION`, with torchrun's environment; VERSION is that of FSDP.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from rose.arguments import run_command
from rose.trainers.fine_tune import ranks
from rose.trainers.fine_tune.callback import SlackCallback
from rose.trainers.fine_tune.sequences import padded

ROWS = [
    {"input_ids": list(range(start, start + 8)), "labels": list(range(start, start + 8))}
    for start in range(4, 20)
]


def trained(folder: Path, version: int, callbacks: list[Any]) -> dict[str, torch.Tensor]:
    """Returns this rank's shards."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            max_steps=3,
            learning_rate=1e-2,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_timeout=60,
            bf16=False,
            fsdp=True,
            fsdp_config={"version": version, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=ROWS,
        data_collator=lambda batch: padded(batch, 0),
        callbacks=callbacks,
    )
    trainer.train()
    shards = dict(trainer.model_wrapped.named_parameters())
    assert (
        sum(shard.numel() for shard in map(local, shards.values()))
        < Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).num_parameters()
    ), "nothing is sharded"
    return {name: local(shard).detach().clone() for name, shard in shards.items()}


def local(shard: Any) -> torch.Tensor:
    tensor: torch.Tensor = shard.to_local() if hasattr(shard, "to_local") else shard
    return tensor


def main(argv: Sequence[str]) -> int:
    pool, folder, version = argv
    slack = SlackCallback(pool)
    alone = trained(Path(folder), int(version), [])
    as_guest = trained(Path(folder), int(version), [slack])
    assert slack.guest is not None and torch.distributed.get_world_size() == 2
    is_same = all(torch.equal(alone[name], shard) for name, shard in as_guest.items())
    found = {"is_same": is_same, "grants": slack.guest.num_grants, "computed_s": slack.guest.computed_s}
    (Path(folder) / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    ranks.Ranks.part()
    return 0


if __name__ == "__main__":
    sys.exit(run_command("trainer", main, sys.argv[1:]))
