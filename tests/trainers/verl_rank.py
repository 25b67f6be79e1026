"""Run as a program: one of two training processes of verl, which publish a version together.

`python verl_rank.py RANK WORLD RELAY [CHECKPOINT]`; WORLD is a file by which the ranks find each other. It
prints the dtypes of the run's tensors.
"""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from rose.trainers.verl import RelayRollout


def main(rank: str, world: str, relay_url: str, checkpoint: str | None = None) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{world}", rank=int(rank), world_size=2)
    rose = {"weights": {"relay_url": relay_url}}
    config: Any = SimpleNamespace(custom={"rose": rose})
    model: Any = SimpleNamespace(share_embeddings_and_output_weights=False, local_path=checkpoint)
    rollout: Any = RelayRollout(config, model, None)
    weights = {"a": torch.ones(4, 4), "decay": torch.ones(4)}
    asyncio.run(rollout.update_weights(iter(weights.items()), global_steps=0))
    print(*sorted(spec.dtype for spec in rollout._weights.publisher.layout.tensors))
    rollout._weights.publisher.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
