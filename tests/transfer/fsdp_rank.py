"""One rank of a torch trainer whose model FSDP2 has sharded; publishes versions 0 and 1, for tests.

python fsdp_rank.py RANK NUM_RANKS RENDEZVOUS_FILE RELAY_URL
"""

import sys

import torch
import torch.distributed as dist
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


def main() -> None:
    rank, num_ranks = int(sys.argv[1]), int(sys.argv[2])
    rendezvous, relay_url = sys.argv[3:]
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
    main()
