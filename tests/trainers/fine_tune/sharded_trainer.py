"""One rank of a trainer with sharded weights (FSDP), which trains alone and then as a guest, and compares the
shards.

`python -m tests.trainers.fine_tune.sharded_trainer POOL FOLDER VERSION`, with torchrun's environment; VERSION
is that of FSDP. The loop is torch's own, as transformers' Trainer shards on GPUs only.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerControl, TrainerState, TrainingArguments
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from rose.arguments import run_command
from rose.trainers.fine_tune.callback import SlackCallback
from rose.trainers.fine_tune.measuring import measure_pieces

STEPS = 3


def whole_model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))


def sharded(version: str) -> Any:
    model = whole_model()
    whole = sum(weight.numel() for weight in model.parameters())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if version == "1":
        policy = ModuleWrapPolicy({Qwen3DecoderLayer})
        model = FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            auto_wrap_policy=policy,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    assert sum(weight.numel() for weight in shards(model).values()) < 0.6 * whole
    return model


def shards(model: Any) -> dict[str, torch.Tensor]:
    """This rank's parts of the weights."""
    found = {}
    for name, weight in model.named_parameters():
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        found[name] = local.detach().clone()
    return found


def trained(folder: Path, version: str, slack: SlackCallback | None) -> dict[str, torch.Tensor]:
    model = sharded(version)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    events: tuple[Any, ...] = (args, TrainerState(), TrainerControl())
    if slack is not None:
        slack.on_train_begin(*events, model=model, optimizer=optimizer)
    before = shards(model)
    for step in range(STEPS):
        start = 4 + 8 * (2 * step + dist.get_rank())
        tokens = torch.arange(start, start + 8)[None]
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if slack is not None:
            slack.on_optimizer_step(*events)
        optimizer.zero_grad()
    if slack is not None:
        slack.on_train_end(*events)
    after = shards(model)
    assert all(not torch.equal(before[name], after[name]) for name in after if after[name].numel())
    return after


def main(argv: Sequence[str]) -> int:
    pool, folder, version = argv
    dist.init_process_group("gloo")
    slack = SlackCallback(pool, lengths=[8])
    alone = trained(Path(folder), version, None)
    as_guest = trained(Path(folder), version, slack)
    assert slack.guest is not None
    is_same = all(torch.equal(alone[name], shard) for name, shard in as_guest.items())
    found = {
        "is_same": is_same,
        "grants": slack.guest.num_grants,
        "computed_s": slack.guest.computed_s,
        "token_bytes": slack.activation_token_bytes,
        "token_bytes_of_whole": measure_pieces(whole_model(), [8]),
    }
    (Path(folder) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(run_command("trainer", main, sys.argv[1:]))
