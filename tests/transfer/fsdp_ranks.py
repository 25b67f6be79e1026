"""The ranks of a torch trainer with a sharded model; they publish versions 0 and 1, for tests.

python fsdp_ranks.py NUM_RANKS SHARDING RENDEZVOUS_FILE RELAY_URL

SHARDING: fsdp (FSDP2), tp (torch's tensor parallelism), or both, with two ranks of tensor parallelism inside
each shard. The ranks are forks of one process, which has loaded torch for all of them.
"""

import sys

import torch
import torch.distributed as dist
from fork_ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rose.transfer.publish.publisher import WeightPublisher


def make_model(sharding: str = "fsdp") -> torch.nn.Module:
    """Makes the same model in every process: rows don't divide evenly, one tensor has fewer than ranks.

    FSDP2 takes no parameter that tensor parallelism has cut unevenly, so with both only the rows of FSDP2's
    own cut don't divide evenly.
    """
    torch.manual_seed(0)
    width = 10 if sharding == "both" else 7
    return torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Linear(width, 1))


def step(model: torch.nn.Module) -> None:
    """Changes every element in place, as an optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def move(model: torch.nn.Module) -> None:
    """Gives every parameter other memory, as a model gets that goes to the host and back between phases."""
    model._apply(torch.clone)  # type: ignore[no-untyped-call]


def shard(model: torch.nn.Module, sharding: str, num_ranks: int) -> None:
    """Cuts the model's parameters in place: the first layer by rows, the second by columns under "tp"."""
    num_shards, num_parts = {"fsdp": (num_ranks, 1), "tp": (1, num_ranks), "both": (num_ranks // 2, 2)}[
        sharding
    ]
    mesh: DeviceMesh = init_device_mesh("cpu", (num_shards, num_parts), mesh_dim_names=("fsdp", "tp"))
    if num_parts > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if num_shards > 1:
        fully_shard(model, mesh=mesh["fsdp"])


def run(rank: int, num_ranks: int, sharding: str, rendezvous: str, relay_url: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    model = make_model(sharding)
    shard(model, sharding, num_ranks)
    publisher = WeightPublisher(model, relay_url, "run", rank=rank, num_ranks=num_ranks)
    publisher.publish()
    move(model)
    step(model)
    publisher.publish()
    publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_ranks(run, *sys.argv[1:]))
