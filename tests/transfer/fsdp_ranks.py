"""The ranks of a torch trainer whose model FSDP2 has sharded; they publish versions 0 and 1, for tests.

python fsdp_ranks.py NUM_RANKS RENDEZVOUS_FILE RELAY_URL

The ranks are forks of one process, which has loaded torch for all of them.
"""

import sys

import torch
import torch.distributed as dist
from fork_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rose.transfer.publish.publisher import WeightPublisher


def make_model() -> torch.nn.Module:
    """Makes the same model in every process: rows don't divide evenly, one tensor has fewer than ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 1))


def step(model: torch.nn.Module) -> None:
    """Changes every element in place, as an optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def run(rank: int, num_ranks: int, rendezvous: str, relay_url: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    publisher = WeightPublisher(model, relay_url, "run", rank=rank, num_ranks=num_ranks)
    publisher.publish()
    step(model)
    publisher.publish()
    publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_ranks(run, *sys.argv[1:]))
